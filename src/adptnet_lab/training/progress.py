"""What is seen of a run: a live bar on a terminal, plain lines elsewhere."""

import abc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["Screen", "Silent", "screen"]

SECONDS = 10.0  # between plain lines


class Screen(abc.ABC):
    """Shows how a run goes."""

    @abc.abstractmethod
    def step(self, done: int, loss: float, tokens: int) -> None:
        """A step is done: the loss, and the tokens it saw."""

    @abc.abstractmethod
    def score(self, name: str, value: float) -> None:
        """A score that is shown from now on."""


class Silent(Screen):
    """Shows nothing."""

    def step(self, done: int, loss: float, tokens: int) -> None:
        pass

    def score(self, name: str, value: float) -> None:
        pass


class _Lines(Screen):
    """A line every ten seconds, and at the last step."""

    def __init__(self, steps: int):
        self._begun = self._said = time.monotonic()
        self._steps = steps
        self._seen = 0
        self._tokens = 0
        self._score = ""

    def step(self, done: int, loss: float, tokens: int) -> None:
        self._tokens += tokens
        self._seen += 1
        now = time.monotonic()
        if now - self._said >= SECONDS or done == self._steps:
            self._said = now
            spent = max(now - self._begun, 1e-9)
            left = (self._steps - done) * spent / self._seen
            rate = self._tokens / spent
            line = f"step {done}/{self._steps}  loss {loss:.4f}{self._score}  {rate:,.0f} tokens/s  {left:.0f} s left"
            with suppress(BrokenPipeError):  # a run goes on when nobody reads its lines any more
                print(line, flush=True)

    def score(self, name: str, value: float) -> None:
        self._score = f"  {name} {value:.4f}"


@contextmanager
def screen(steps: int) -> Iterator[Screen]:
    """A screen for a run of `steps`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console()
    if not console.is_terminal:
        yield _Lines(steps)
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}{task.fields[score]}  {task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=steps, loss=float("nan"), score="", rate=0.0)
        begun, tokens_seen = time.monotonic(), 0

        class Bar(Screen):
            def step(self, done: int, loss: float, tokens: int) -> None:
                nonlocal tokens_seen
                tokens_seen += tokens
                rate = tokens_seen / max(time.monotonic() - begun, 1e-9)
                progress.update(bar, completed=done, loss=loss, rate=rate)

            def score(self, name: str, value: float) -> None:
                progress.update(bar, score=f"  {name} {value:.4f}")

        yield Bar()
