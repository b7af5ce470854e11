"""The linear recurrence with one diagonal transition, as a convolution."""

from .reference import lti_convolution

__all__ = ["lti_convolution"]
