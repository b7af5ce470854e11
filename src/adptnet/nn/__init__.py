"""Modules: the layer, what is built around it, and whole models."""

from .autoencoder import AutoEncoder, AutoEncoderSpec
from .baselines import BASELINES, baseline, lru, matched, parameter_count, s4d
from .bidirectional import Bidirectional, BidirectionalSpec
from .block import BlockSpec, ResidualBlock
from .layer import ADPTNet, LayerSpec, Recurrent, RecurrentLayer
from .model import ModelSpec, SequenceModel
from .stack import Stack, StackSpec
from .swiglu import SwiGLUBlock, SwiGLUBlockSpec
from .variants import CoupledADPTNet, LinearADPTNet, TaylorADPTNet
from .verify import Verification, verify

__all__ = [
    "BASELINES",
    "ADPTNet",
    "AutoEncoder",
    "AutoEncoderSpec",
    "Bidirectional",
    "BidirectionalSpec",
    "BlockSpec",
    "CoupledADPTNet",
    "LayerSpec",
    "LinearADPTNet",
    "ModelSpec",
    "Recurrent",
    "RecurrentLayer",
    "ResidualBlock",
    "SequenceModel",
    "Stack",
    "StackSpec",
    "SwiGLUBlock",
    "SwiGLUBlockSpec",
    "TaylorADPTNet",
    "Verification",
    "baseline",
    "lru",
    "matched",
    "parameter_count",
    "s4d",
    "verify",
]
