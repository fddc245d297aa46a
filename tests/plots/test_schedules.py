"""Pictures of topologies show every link, every group and every weight, and nothing else."""

import subprocess
import sys

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.patches import FancyArrowPatch, Polygon

import decentfn as df

pytestmark = pytest.mark.thorough

DRAWN = {
    "one-peer-exp": df.topology("one-peer-exp", 8),
    "directed": df.topology("one-peer-exp-directed", 8),
    "static-exp": df.topology("static-exp", 64),
    "base": df.topology("base", 11),
    "random": df.topology("random-matching", 9),
    "groups": df.topology("alternating-exp-ring", 16, local_world_size=4),
    "groups and messages": df.topology("hierarchical", 16, local_world_size=4),
    "alone": df.topology("complete", 1),
}


def drawn(axes):
    """Links as (sender, receiver), and groups as sets, read back from what lies on the axes."""
    [centers] = [{tuple(np.round(circle.center, 6)): int(i) for i, circle in enumerate(_circles(axes))}]
    [lines] = [c for c in axes.collections if isinstance(c, LineCollection)]

    def worker(point):
        return centers[tuple(np.round(point, 6))]

    links = set()
    for start, end in lines.get_segments():
        links |= {(worker(start), worker(end)), (worker(end), worker(start))}
    for arrow in axes.patches:
        if isinstance(arrow, FancyArrowPatch):
            links.add(tuple(map(worker, arrow._posA_posB)))
    polygons = [patch for patch in axes.patches if isinstance(patch, Polygon)]
    return links, {frozenset(map(worker, polygon.get_xy())) for polygon in polygons}


def _circles(axes):
    return [patch for patch in axes.patches if type(patch).__name__ == "Circle"]


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("t", [0, 1])
def test_the_graph_has_the_edges_of_the_mixing_matrix(name, t):
    topology = DRAWN[name]
    [axes] = df.plots.graph(topology, t).axes
    links, groups = drawn(axes)
    met = {(j, i) for group in groups for i in group for j in group if i != j}
    i, j = np.nonzero(df.mixing_matrix(topology, t).numpy())
    assert links | met == {(b, a) for a, b in zip(i.tolist(), j.tolist(), strict=True) if a != b}
    assert len(_circles(axes)) == topology.num_workers


def test_one_way_links_point_from_the_sender_to_the_receiver():
    links, _ = drawn(df.plots.graph(DRAWN["directed"], 0).axes[0])
    assert links == {(i, (i + 1) % 8) for i in range(8)}


@pytest.mark.parametrize("name", DRAWN)
def test_the_matrix_is_the_mixing_matrix(name):
    topology = DRAWN[name]
    for t in (0, 1):
        image = df.plots.matrix(topology, t).axes[0].images[0].get_array()
        assert np.array_equal(np.ma.filled(image, 0.0), df.mixing_matrix(topology, t).numpy())


@pytest.mark.parametrize(
    ("topology", "phases", "shown"),
    [
        (DRAWN["one-peer-exp"], None, ["phase 0", "phase 1", "phase 2"]),
        (DRAWN["one-peer-exp"], [4, 2], ["phase 1", "phase 2"]),
        (DRAWN["random"], [3, 70], ["step 3", "step 70"]),
        (DRAWN["random"], None, [f"step {t}" for t in range(4)]),
        (df.topology("shift-one", 26), None, [f"phase {t}" for t in range(12)]),
    ],
    ids=str,
)
def test_a_picture_has_a_graph_and_a_matrix_for_each_phase(topology, phases, shown):
    figure = df.plots.topology(topology, phases)
    titles = [axes.get_title().split("\n")[0] for axes in figure.axes]
    assert [title for title in titles if title] == shown and len(titles) == 2 * len(shown)


def test_a_picture_can_be_saved(tmp_path):
    df.plots.topology(DRAWN["groups and messages"], [0, 1]).savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_users_axes_are_drawn_on_and_pyplot_is_left_alone():
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure

    mine = Figure()
    left, right = mine.subplots(1, 2)
    assert df.plots.graph(DRAWN["base"], 0, left) is mine and df.plots.matrix(DRAWN["base"], 0, right) is mine
    assert left.patches and right.images and mine.axes == [left, right]
    assert not plt.get_fignums()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda p: p.topology("ring"), r"df.plots.topology\('ring'\): expected a topology"),
        (lambda p: p.topology(df.topology("ring", 300)), "more than 256 workers cannot be read"),
        (lambda p: p.topology(DRAWN["base"], range(13)), "1 to 12 steps"),
        (lambda p: p.topology(DRAWN["base"], []), "1 to 12 steps"),
        (lambda p: p.topology(DRAWN["base"], 3), "1 to 12 steps"),
        (lambda p: p.topology(DRAWN["base"], [-1]), r"t=-1\): a step is an integer, from 0"),
        (lambda p: p.graph(DRAWN["base"], 0.5), r"df.plots.graph\(t=0.5\)"),
        (lambda p: p.graph(DRAWN["base"], 0, "left"), "axes are one matplotlib Axes"),
        (lambda p: p.matrix(None, 0), "expected a topology"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(df.plots)


def test_without_matplotlib_the_library_works_and_a_picture_names_the_extra():
    code = """
import sys
import decentfn as df
assert not [name for name in sys.modules if name.startswith("matplotlib")]
sys.modules["matplotlib"] = sys.modules["matplotlib.figure"] = None  # as if it were not installed
try:
    df.plots.topology(df.topology("ring", 4))
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "pip install matplotlib" in done.stdout, done.stderr


def test_a_notebook_shows_the_picture_without_pyplot():
    assert df.plots.graph(df.topology("ring", 4), 0)._repr_png_().startswith(b"\x89PNG")
