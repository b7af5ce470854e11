"""Helpers that several test files share. Test files import from here, never from one another."""

from . import typechecks

__all__ = ["typechecks"]
