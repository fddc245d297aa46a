"""t counts on: a step whose state is a later step's result is a mistake; a gap is told once."""

import copy
import io
import linecache
import shutil
import warnings

import pytest
import torch

import decentfn as df
from decentfn.compat import decent_dp
from decentfn.core import trees

N = 4


def _loss(params, batch):
    return ((params["w"] - batch) ** 2).mean()


def _algorithm(loss_fn=_loss, wrap=lambda algorithm: algorithm):
    return wrap(df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("ring", N)))


def _simulated(algorithm):
    return df.simulate(algorithm.step, N), df.stack(algorithm.init({"w": torch.zeros(3)}), N), torch.ones(N, 2, 3)


def _swept(algorithm):
    step, state, batch = _simulated(algorithm)
    return df.sweep(step, 2), df.stack_runs([state, state]), df.stack_runs([batch, batch])


MODES = {
    "eager": lambda: _simulated(_algorithm()),
    "guarded": lambda: _simulated(_algorithm(wrap=df.guard)),
    "averaged": lambda: _simulated(_algorithm(wrap=lambda a: df.ema(a, 0.9))),
    "by autograd": lambda: _simulated(_algorithm(df.autograd(_loss))),
    "swept": lambda: _swept(_algorithm()),
}
TRANSFORMS = {
    "pure": lambda step: step,
    "donated": df.donate,
    "compiled": lambda step: df.compile(step, backend="eager"),
    "compiled, pure": lambda step: df.compile(step, backend="eager", donate=False),
    "surviving": df.survive,
}


def cells(first, *others):
    """The first kind with every transform, the others with two; what surrounds a step asks the same of every kind."""
    for kind in (first, *others):
        for transform in TRANSFORMS:
            repeats = kind != first and transform not in ("pure", "donated")
            yield pytest.param(kind, transform, marks=[pytest.mark.slow] * repeats or compiles(transform))


def compiles(transform):
    """Marks of a transform: the first tier compiles nothing."""
    return [pytest.mark.thorough] * transform.startswith("compiled")


@pytest.mark.parametrize(("mode", "transform"), list(cells(*MODES)))
def test_a_loop_that_starts_t_again_is_refused_with_both_numbers(mode, transform):
    step, state, batch = MODES[mode]()
    step = TRANSFORMS[transform](step)
    for t in range(3):
        state, _ = step(state, batch, t)
    kept = trees.map(torch.clone, state)
    for t in (0, 2, torch.tensor(1)):
        with pytest.raises(ValueError, match=rf"t={int(t)}\): the state is the result of step t=2.*epochs") as error:
            step(state, batch, t)
        assert "t=3" in str(error.value)
    for was, now in zip(trees.leaves(kept), trees.leaves(state), strict=True):
        assert torch.equal(was, now)  # nothing was written
    step(state, batch, 3)


def test_ranks_refuse_it_too():
    algorithm = _algorithm()

    def train(rank):
        state = algorithm.init({"w": torch.zeros(3)})
        state, _ = algorithm.step(state, torch.ones(2, 3), 0)
        with pytest.raises(ValueError, match="result of step t=0"):
            algorithm.step(state, torch.ones(2, 3), 0)
        return float(df.params(algorithm.step(state, torch.ones(2, 3), 1)[0])["w"][0])

    assert len(set(df.testing.on_ranks(N, train))) == 1


def test_an_old_state_may_be_used_again_and_states_may_take_turns():
    step, state, batch = _simulated(_algorithm())
    first, _ = step(state, batch, 0)
    again, _ = step(state, batch, 0)
    after, _ = step(first, batch, 1)
    for t in (1, 2):  # two states, one step
        first, _ = step(first, batch, t)
        again, _ = step(again, batch, t)
    assert torch.equal(df.params(first)["w"], df.params(again)["w"])
    assert after is not first


def _from_disk(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("t", [0, 1])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda state: trees.map(torch.clone, state), _from_disk])
def test_a_copy_is_a_state_like_any_other(copied, t):
    step, state, batch = _simulated(_algorithm())
    step = df.donate(step)
    state, _ = step(state, batch, 0)
    kept = copied(state)
    for later in range(1, 4):
        state, _ = step(state, batch, later)
    back, _ = step(kept, batch, t)
    assert back is kept


CHANGES = {
    "learning rate": lambda state: df.set_learning_rate(state, 0.2),
    "clipped": lambda state: df.with_params(state, trees.map(lambda x: x.clamp(-1, 1), df.params(state))),
    "averaged": decent_dp.keep_average,
    "both": lambda state: df.set_learning_rate(df.with_params(state, df.params(state)), 0.2),
}


@pytest.mark.parametrize(("change", "transform"), list(cells(*reversed(CHANGES))))
def test_another_learning_rate_or_other_parameters_in_each_epoch_are_no_new_run(change, transform):
    step, state, batch = _simulated(_algorithm())
    step = TRANSFORMS[transform](step)
    state = CHANGES[change](state)
    state, _ = step(state, batch, 0)
    state = CHANGES[change](state)
    with pytest.raises(ValueError, match=r"t=0\): the state is the result of step t=0"):
        step(state, batch, 0)
    step(state, batch, 1)


def test_functions_that_take_turns_continue_one_count():
    """One with outer steps and one without: the state's own last step counts, not the function's."""
    _, state, batch = _simulated(_algorithm())
    steps = [df.donate(df.simulate(_algorithm().step, N)) for _ in range(2)]
    for t in range(6):
        state, _ = steps[t % 3 == 0](state, batch, t)
    with pytest.raises(ValueError, match="the result of step t=5"):
        steps[0](state, batch, 3)


@pytest.mark.parametrize(("mode", "transform"), list(cells("eager", "guarded", "averaged", "by autograd")))
def test_a_restored_run_that_starts_t_again_is_refused(mode, transform, tmp_path):
    """In a new process, too: the checkpoint has the next t, and nothing else is known of its run."""
    step, state, batch = MODES[mode]()
    step = TRANSFORMS[transform](step)
    df.checkpoint.save(tmp_path / "run", state, 5)
    state, start, _, _ = df.checkpoint.restore(tmp_path / "run", state)
    kept = trees.map(torch.clone, state)
    for t in (0, 4):
        with pytest.raises(ValueError, match=rf"t={t}\): the state is the result of step t=4, so the next step is t=5"):
            step(state, batch, t)
    for was, now in zip(trees.leaves(kept), trees.leaves(state), strict=True):
        assert torch.equal(was, now)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = step(state, batch, start)
        step(state, batch, start + 1)


def test_a_restored_run_that_leaves_steps_out_is_told(tmp_path):
    step, state, batch = _simulated(_algorithm())
    df.checkpoint.save(tmp_path, state, 5)
    with pytest.warns(UserWarning, match=r"t=7\) after step t=4: 2 rounds"):
        step(df.checkpoint.restore(tmp_path, state).state, batch, 7)


def test_a_checkpoint_of_a_start_goes_on_from_the_start(tmp_path):
    step, state, batch = _simulated(_algorithm())
    df.checkpoint.save(tmp_path, state, 0)
    step(df.checkpoint.restore(tmp_path, state).state, batch, 0)


@pytest.mark.parametrize("saved_by", [N, 2])
def test_restored_ranks_refuse_an_earlier_t_too(saved_by, tmp_path):
    """As many as have saved, or others, which start from the mean and count on."""
    algorithms = {n: df.adapt_while_communicate(_loss, df.sgd(0.1), df.topology("ring", n)) for n in (2, N)}
    df.checkpoint.save(tmp_path, df.stack(algorithms[saved_by].init({"w": torch.zeros(3)}), saved_by), 5)
    algorithm = algorithms[N]

    def train(rank):
        state, start, _, _ = df.checkpoint.restore(tmp_path, algorithm.init({"w": torch.zeros(3)}))
        with pytest.raises(ValueError, match="the result of step t=4, so the next step is t=5"):
            algorithm.step(state, torch.ones(2, 3), 0)
        return float(df.params(algorithm.step(state, torch.ones(2, 3), start)[0])["w"][0])

    assert len(set(df.testing.on_ranks(N, train))) == 1


def test_a_gap_is_told_once_and_by_both_numbers():
    step, state, batch = _simulated(_algorithm())
    with pytest.warns(UserWarning, match=r"t=3\) after step t=1: 1 rounds"):
        state, _ = step(step(state, batch, 1)[0], batch, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = step(state, batch, 5)
        state, _ = step(state, batch, 6)


def test_saves_count_on_over_epochs(tmp_path):
    _, state, _ = _simulated(_algorithm())
    with df.checkpoint.Saver(tmp_path / "run") as saver:
        saver.save(state, 6)
        saver.save(state, 6)
        with pytest.raises(ValueError, match=r"step=2.*last checkpoint is of step 6"):
            saver.save(state, 2)
        saver.save(state, 7)


def test_another_saver_of_a_run_counts_on_too(tmp_path):
    """`latest` is what was written last, so a step below the one that was restored would be the newest."""
    _, state, _ = _simulated(_algorithm())
    df.checkpoint.save(tmp_path / "run", state, 3)
    df.checkpoint.save(tmp_path / "run", state, 6)
    with pytest.raises(ValueError, match=r"step=2.*last checkpoint is of step 6"):
        df.checkpoint.save(tmp_path / "run", state, 2)
    df.checkpoint.save(tmp_path / "another", state, 2)
    with df.checkpoint.Saver(tmp_path / "run") as saver:
        state, start, _, _ = df.checkpoint.restore(df.checkpoint.checkpoints(tmp_path / "run")[0], state)
        assert start == 3  # back to an earlier one, the run goes on from there
        with pytest.raises(ValueError, match=r"step=2.*last checkpoint is of step 3"):
            saver.save(trees.map(torch.clone, state), 2)
        saver.save(state, 3)
    shutil.rmtree(tmp_path / "run")
    df.checkpoint.save(tmp_path / "run", trees.map(torch.clone, state), 0)  # another run


@pytest.mark.parametrize("transform", [pytest.param(name, marks=compiles(name)) for name in TRANSFORMS])
def test_a_checkpoint_is_of_the_step_after_the_last(transform, tmp_path):
    step, state, batch = _simulated(_algorithm())
    step = TRANSFORMS[transform](step)
    for t in range(3):
        state, _ = step(state, batch, t)
    for wrong in (1, 2):
        with pytest.warns(UserWarning, match=rf"save\(step={wrong}\): .*result of step t=2.*pass t \+ 1"):
            df.checkpoint.save(tmp_path / str(wrong), state, wrong)
    df.checkpoint.save(tmp_path, state, 3)


def test_a_warning_of_steps_taken_twice_points_at_the_users_line_and_comes_once_per_run(tmp_path):
    step, state, batch = _simulated(_algorithm())
    with df.checkpoint.Saver(tmp_path / "run") as saver, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for t in range(3):
            state, _ = step(state, batch, t)
            saver.save(state, t)
        df.checkpoint.save(tmp_path / "another", state, 2)
        df.checkpoint.save(tmp_path / "another", state, 2)
    assert [(it.filename, "save(" in linecache.getline(it.filename, it.lineno)) for it in seen] == [
        (__file__, True)
    ] * 2


@pytest.mark.thorough
def test_a_warning_of_rounds_left_out_points_at_the_users_line():
    for transform in TRANSFORMS.values():
        step, state, batch = _simulated(_algorithm())
        step = transform(step)
        state, _ = step(state, batch, 0)
        with pytest.warns(UserWarning, match="1 rounds of the schedule are left out") as seen:
            step(state, batch, 2)
        assert seen[0].filename == __file__


@pytest.mark.parametrize("transform", [df.donate, lambda step: df.compile(step, backend="eager")])
def test_after_an_error_the_run_goes_on_at_the_step_that_it_names(transform):
    """A donated step, compiled or not, has written over the state when `df.guard` raises."""
    algorithm = _algorithm(wrap=lambda algorithm: df.guard(algorithm, limit=1))
    step, state, batch = _simulated(algorithm)
    step = transform(step)
    for t in range(2):
        state, _ = step(state, batch, t)
    with pytest.raises(df.errors.NonFinite) as error:
        step(state, torch.full_like(batch, torch.nan), 2)
    assert error.value.next_step is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(state, batch, error.value.next_step)
