"""Helpers for the tests of the reproduction of the paper."""

from adptnet_lab.paper import reproduce
from adptnet_lab.paper.recipe import GridPoint, Row, Rows
from adptnet_lab.paper.registry import load_results
from adptnet_lab.paper.rows import to_row_value


def run_smoke(folder, *names, **options):
    """Run results at `--scale smoke`, with rows in `folder`, and return the number of points that were run."""
    return reproduce.run(reproduce.Reproduce(names, scale="smoke", rows=folder, **options))


def make_row(result, point, scale="smoke", **changes):
    """Return a stored row of a point, without numbers."""
    identity = {"label": result.name, "scale": scale, "settings": to_row_value(point.settings), "seed": point.seed}
    return {**identity, "recipe": result.recipe.version, "numbers": {}, "time": {}, **changes}


def make_laptop_rows(name, numbers, seeds=None):
    """Return rows at `--scale laptop` whose numbers are `numbers(point)`; with `seeds`, that many per setting."""
    recipe = load_results()[name].recipe
    points = recipe.points("laptop")
    if recipe.rank is not None:  # only the points of the version with the highest rank
        points = [p for p in points if recipe.rank(p.settings) == max(recipe.rank(q.settings) for q in points)]
    if seeds is not None:
        points = [GridPoint(p.settings, seed) for p in points if p.seed == 0 for seed in range(seeds)]
    return Rows([Row(p.settings, p.seed, numbers(p), {}, "laptop") for p in points])


def judge_all(name, rows):
    """Return the outcome of every check of a result, by claim id."""
    return {id: check.test(rows).outcome for id, check in load_results()[name].recipe.checks.items()}


def record_runs(monkeypatch):
    """Replace the runs of points with stubs, and return the list to which the names of their results are appended."""
    names = []

    def run_point(name, point, options):
        names.append(name)
        return make_row(load_results()[name], point, options.scale, time={"seconds": 0.0})

    monkeypatch.setattr(reproduce, "_run_point", run_point)
    return names
