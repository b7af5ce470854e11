"""Scores that several tasks share."""

import torch
from torch import Tensor

from .base import IGNORED, Scores

__all__ = ["macro_accuracy", "recall_scores"]


def recall_scores(outputs: Tensor, targets: Tensor) -> Scores:
    """Accuracy over the positions that count, and the share of sequences that are right at all of them."""
    counted = targets != IGNORED
    correct = outputs.argmax(-1) == targets
    return {
        "accuracy": float(correct[counted].double().mean()),
        "whole_sequence": float((correct | ~counted).all(-1).double().mean()),
    }


def macro_accuracy(predictions: Tensor, targets: Tensor) -> float:
    """The share that is right in each class, averaged over the classes among the targets."""
    counted = targets != IGNORED
    truth = targets[counted]
    right = truth[predictions[counted] == truth]
    present = torch.bincount(truth)
    shares = torch.bincount(right, minlength=len(present)).double() / present
    return float(shares[present > 0].mean())
