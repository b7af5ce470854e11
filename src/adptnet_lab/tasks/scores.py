"""Scores shared by several tasks."""

import torch
from torch import Tensor

from .base import IGNORED, Scores

__all__ = ["macro_accuracy", "recall_scores"]


def recall_scores(outputs: Tensor, targets: Tensor) -> Scores:
    """Return the accuracy over the targets that are not `IGNORED`, and the fraction of fully correct sequences.

    Args:
        outputs: Logits, (batch, time, classes).
        targets: (batch, time).
    """
    counted = targets != IGNORED
    correct = outputs.argmax(-1) == targets
    return {
        "accuracy": float(correct[counted].double().mean()),
        "whole_sequence": float((correct | ~counted).all(-1).double().mean()),
    }


def macro_accuracy(predictions: Tensor, targets: Tensor) -> float:
    """Return the accuracy within each class, averaged over the classes among the targets.

    Args:
        predictions: Predicted classes, of the shape of `targets`.
        targets: Classes; those that are `IGNORED` do not count.
    """
    counted = targets != IGNORED
    truth = targets[counted]
    right = truth[predictions[counted] == truth]
    present = torch.bincount(truth)
    shares = torch.bincount(right, minlength=len(present)).double() / present
    return float(shares[present > 0].mean())
