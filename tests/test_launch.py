"""The launch scripts: run where one machine can play their part, else read against what they are for."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.ranks import free_port

LAUNCH = Path(__file__).parent.parent / "examples" / "launch"
DIGITS = [str(LAUNCH.parent / "digits.py"), "--steps", "5"]

pytestmark = [pytest.mark.xdist_group("launch"), pytest.mark.thorough]


def start(script, *arguments, **variables):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        ["bash", str(LAUNCH / script), *arguments],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_one_machine():
    said, errors = (job := start("one_machine.sh", *DIGITS, PROCESSES="2")).communicate(timeout=600)
    assert job.returncode == 0 and said.startswith("2 workers"), errors


def test_two_machines():
    """Two agents, each of one process, which know each other by the rendezvous alone."""
    port = str(free_port())
    jobs = [
        start("two_machines.sh", *DIGITS, HEAD="localhost", PORT=port, PROCESSES="1", ADDRESS=f"127.0.0.{i}")
        for i in (1, 2)
    ]
    said = [job.communicate(timeout=600) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    assert "".join(out for out, _ in said).count("2 workers") == 1


TRAIN = """
import sys, time
import torch
import decentfn as df

world = df.init()
init, step = df.adapt_while_communicate(lambda x, b: (x - b).square().sum(), df.sgd(0.1), df.topology("ring", world.size))
state = init(torch.zeros(2))
with df.preemption(sys.argv[1]) as stop:
    for t in range(int(sys.argv[2])):
        state, _ = step(state, torch.ones(2), t)
        if t == 10 and world.rank == 0:
            open(sys.argv[1] + ".started", "w").close()
        time.sleep(0.005)
        if stop(t):
            stop.leave()
"""
COMMANDS = {
    "srun": 'echo $$ > "$HERE/step"\nexec "$@"',
    "scancel": 'echo "$@" >> "$HERE/said"\nkill -TERM "$(cat "$HERE/step")"',
    "scontrol": 'case $1 in show) echo localhost;; *) echo "$@" >> "$HERE/said";; esac',
}


def submit(folder, steps, **commands):
    """The batch script on stand-ins of SLURM's commands; bash is real."""
    for name, lines in (COMMANDS | commands).items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{lines}\n")
        (folder / name).chmod(0o755)
    (folder / "train.py").write_text(TRAIN)
    marker = str(folder / "preempted.json")
    return start(
        "slurm.sbatch",
        *(str(folder / "train.py"), marker, marker, str(steps)),
        HERE=str(folder),
        PATH=os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]),
        PROCESSES="2",
        SLURM_JOB_ID=str(os.getpid()),
        SLURM_NNODES="1",
        SLURM_JOB_NODELIST="localhost",
    )


@pytest.mark.slow
def test_a_slurm_job_that_is_signalled_saves_and_is_requeued(tmp_path):
    job = submit(tmp_path, steps=100000)
    while job.poll() is None and not (tmp_path / "preempted.json.started").exists():
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    _, errors = job.communicate(timeout=600)
    assert job.returncode == 0 and (tmp_path / "preempted.json").exists(), errors
    assert (tmp_path / "said").read_text().splitlines() == [f"--signal=TERM {os.getpid()}.0", f"requeue {os.getpid()}"]


@pytest.mark.parametrize("code", [0, 3])
def test_a_slurm_job_that_ends_by_itself_is_not_requeued(code, tmp_path):
    job = submit(tmp_path, steps=1, srun=f"exit {code}")
    job.communicate(timeout=600)
    assert job.returncode == code and not (tmp_path / "said").exists()


# What of the training operator's CRD (kubeflow.org/v1) and of a pod the file uses. Kubernetes refuses what is of another
# type, and drops fields that it does not know. "name!" must be there.
POD = {
    "terminationGracePeriodSeconds": int,
    "containers!": [
        {
            "name!": str,
            "image!": str,
            "command": [str],
            "args": [str],
            "ports": [{"name": str, "containerPort!": int}],
            "env": [{"name!": str, "value": str}],
            "resources": {"limits": {"nvidia.com/gpu": str, "cpu": str}},
            "volumeMounts": [{"name!": str, "mountPath!": str}],
        }
    ],
    "volumes": [{"name!": str, "persistentVolumeClaim": {"claimName!": str}, "emptyDir": {"medium": str}}],
}
REPLICAS = {"replicas": int, "restartPolicy": {"Never", "OnFailure", "Always", "ExitCode"}, "template!": {"spec!": POD}}
PYTORCH_JOB = {
    "apiVersion!": {"kubeflow.org/v1"},
    "kind!": {"PyTorchJob"},
    "metadata!": {"name!": str},
    "spec!": {
        "nprocPerNode": str,
        "elasticPolicy": {
            "rdzvBackend": {"c10d", "etcd", "etcd-v2"},
            "rdzvId": str,
            "minReplicas": int,
            "maxReplicas": int,
            "maxRestarts": int,
        },
        "runPolicy": {"cleanPodPolicy": {"None", "Running", "All"}, "backoffLimit": int},
        "pytorchReplicaSpecs!": {"Master": REPLICAS, "Worker": REPLICAS},
    },
}


def require(value, shape, where):
    if isinstance(shape, dict):
        known = {key.rstrip("!"): inner for key, inner in shape.items()}
        assert isinstance(value, dict) and set(value) <= set(known), (where, value)
        assert {key[:-1] for key in shape if key.endswith("!")} <= set(value), where
        for key, inner in value.items():
            require(inner, known[key], f"{where}.{key}")
    elif isinstance(shape, list):
        assert isinstance(value, list), where
        for inner in value:
            require(inner, shape[0], f"{where}[]")
    else:
        assert value in shape if isinstance(shape, set) else type(value) is shape, (where, value)


def test_the_kubernetes_job_is_what_the_operator_reads():
    job = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    require(job, PYTORCH_JOB, "job")
    [container] = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch" and container["ports"][0]["name"] == "pytorchjob-port"
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {
        volume["name"] for volume in job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["volumes"]
    }
    for wrong in ({"env": [{"name": "OMP_NUM_THREADS", "value": 8}]}, {"image": None}, {"comand": ["torchrun"]}):
        with pytest.raises(AssertionError):
            require(container | wrong, POD["containers!"][0], "container")


@pytest.mark.parametrize(("agent", "code"), [("exit 0", 0), ("exit 3", 3), ("STOP", 1)])
def test_a_preempted_pod_fails_so_that_it_comes_back_and_others_end_as_torchrun_does(agent, code, tmp_path):
    job = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    [container] = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    lines = [line.replace("/runs/a/", f"{tmp_path}/") for line in container["args"]]
    stop = (
        f"trap 'touch {tmp_path}/preempted.json; exit 0' TERM; touch {tmp_path}/started; while :; do sleep 0.05; done"
    )
    (tmp_path / "torchrun").write_text(f"#!/usr/bin/env bash\n{agent.replace('STOP', stop)}\n")
    (tmp_path / "torchrun").chmod(0o755)
    pod = subprocess.Popen([*container["command"], *lines], env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})
    while agent == "STOP" and not (tmp_path / "started").exists():
        time.sleep(0.05)
    if agent == "STOP":
        pod.terminate()
    assert pod.wait(300) == code
