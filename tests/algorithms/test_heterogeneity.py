"""The experiment on label-skewed digits runs, and shows what was published."""

from dataclasses import replace

import pytest

import decentfn as df
from tests.test_examples import load

pytestmark = [pytest.mark.xdist_group("heterogeneity"), pytest.mark.thorough]  # one process makes the fixture


@pytest.fixture(scope="module")
def experiment():
    return load("heterogeneity")


def test_the_table_has_a_row_per_method_and_two_columns_per_alpha(experiment, capsys):
    config = experiment.Config(steps=3, alphas=(1.0, 0.1), methods=("D-PSGD", "D²", "RelaySGD"), seeds=2)
    results = experiment.main(config)

    head, _, *rows = capsys.readouterr().out.split("\n\n")[0].splitlines()
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    means = ["α = 1: mean model", "α = 1: workers", "α = 0.1: mean model", "α = 0.1: workers"]
    assert columns == ["method", "topology", "learning rate", *means]
    assert [row.split("|")[1].strip() for row in rows] == list(config.methods)
    assert all("±" in cell for row in rows for cell in row.strip(" |").split("|")[3:])
    assert all(0 <= value <= 1 for row in results.values() for cell in row.values() for r in cell for value in r)


def test_every_method_of_the_table_takes_a_step(experiment):
    for method in experiment.METHODS.values():
        experiment.train(method, experiment.Config(steps=1), alpha=0.1, seed=0)


def test_all_methods_start_from_the_same_shards_and_parameters(experiment):
    unmoved = {experiment.train(m, experiment.Config(steps=0), 0.1, 0) for m in experiment.METHODS.values()}
    assert len(unmoved) == 1


def test_where_labels_are_skewed_a_bias_corrected_method_beats_d_psgd_on_the_same_ring(experiment):
    config = replace(experiment.Config(), steps=200)

    def local(name, seed):
        return experiment.train(experiment.METHODS[name], config, alpha=0.1, seed=seed).local

    for seed in (0, 1):
        assert local("exact diffusion", seed) > local("D-PSGD", seed) + 0.01


def test_algorithms_on_schedules_keeps_its_runs_and_says_what_is_refused(experiment, tmp_path, capsys, monkeypatch):
    script = load("algorithms_on_schedules")  # imports heterogeneity, which `experiment` has loaded
    config = script.Config(
        steps=1,
        seeds=1,
        runs=tmp_path / "runs.jsonl",
        algorithms=("adapt_then_combine", "d2", "diloco"),
        schedules=("static-ring", "one-peer-exp"),
    )
    # Other tests register topologies in this process.
    monkeypatch.setattr(df.topologies, "topology_names", lambda: ["one-peer-exp", "one-peer-hypercube", "static-ring"])
    script.main(config)
    said = capsys.readouterr().out
    heads, _, *rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in said.split("\n\n")[0].splitlines()
    ]
    assert heads == ["algorithm", "`static-ring`", "`one-peer-exp`"]
    assert [row[0] for row in rows] == ["`adapt_then_combine`", "`d2`", "`diloco`"]
    assert rows[1][2] == "refused" and "\n- d2: on 'one-peer-exp' disagreement grows" in said
    assert rows[2][2] == "same"
    assert "`one-peer-exp` is also" in said and "**" in rows[0][1]  # one step teaches nobody

    monkeypatch.delattr(script, "train")
    script.main(config)
    assert capsys.readouterr().out == said


def test_every_algorithm_is_a_row_of_the_table(experiment):
    rows = load("algorithms_on_schedules").methods()
    assert set(df.algorithms.__all__) <= set(rows)
