"""The linear recurrence with a constant diagonal transition, as a convolution."""

from .reference import lti_convolution

__all__ = ["lti_convolution"]
