"""Progress of a run on the screen: a live bar on a terminal, plain lines elsewhere."""

import abc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["NoDisplay", "ProgressDisplay", "show_progress"]

SECONDS = 10.0  # between plain lines


class ProgressDisplay(abc.ABC):
    """Base class of displays."""

    @abc.abstractmethod
    def show_step(self, done: int, loss: float, tokens: int) -> None:
        """Show that a step is done.

        Args:
            done: The number of steps done.
            loss: The loss of the step.
            tokens: The number of tokens in its batch.
        """

    @abc.abstractmethod
    def show_score(self, name: str, value: float) -> None:
        """Show a score from now on.

        Args:
            name: The name of the score.
            value: Its value.
        """


class NoDisplay(ProgressDisplay):
    """Shows nothing."""

    def show_step(self, done: int, loss: float, tokens: int) -> None:
        pass

    def show_score(self, name: str, value: float) -> None:
        pass


class _Lines(ProgressDisplay):
    """Prints a line every ten seconds and at the last step."""

    def __init__(self, steps: int, title: str):
        self._start = self._last_line = time.monotonic()
        self._steps = steps
        self._title = f"{title} " if title else ""
        self._shown_steps = 0
        self._tokens = 0
        self._score = ""

    def show_step(self, done: int, loss: float, tokens: int) -> None:
        self._tokens += tokens
        self._shown_steps += 1
        now = time.monotonic()
        if now - self._last_line >= SECONDS or done == self._steps:
            self._last_line = now
            spent = max(now - self._start, 1e-9)
            left = (self._steps - done) * spent / self._shown_steps
            loss_and_score = f"loss {loss:.4f}{self._score}"
            rates = f"{self._tokens / spent:,.0f} tokens/s  {left:.0f} s left"
            with suppress(BrokenPipeError):  # a run continues when nobody reads its lines any more
                print(f"{self._title}step {done}/{self._steps}  {loss_and_score}  {rates}", flush=True)

    def show_score(self, name: str, value: float) -> None:
        self._score = f"  {name} {value:.4f}"


@contextmanager
def show_progress(steps: int, title: str = "") -> Iterator[ProgressDisplay]:
    """Yield a display for a run.

    Args:
        steps: The number of steps of the run.
        title: Text before the bar, or at the beginning of each line.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console()
    if not console.is_terminal:
        yield _Lines(steps, title)
        return
    columns = (
        *((TextColumn("{task.description}"),) if title else ()),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}{task.fields[score]}  {task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(title, total=steps, loss=float("nan"), score="", rate=0.0)
        start, total_tokens = time.monotonic(), 0

        class Bar(ProgressDisplay):
            def show_step(self, done: int, loss: float, tokens: int) -> None:
                nonlocal total_tokens
                total_tokens += tokens
                rate = total_tokens / max(time.monotonic() - start, 1e-9)
                progress.update(bar, completed=done, loss=loss, rate=rate)

            def show_score(self, name: str, value: float) -> None:
                progress.update(bar, score=f"  {name} {value:.4f}")

        yield Bar()
