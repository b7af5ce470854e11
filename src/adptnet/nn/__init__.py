"""Modules: recurrent layers, blocks around them, and whole models."""

from . import presets
from .adpt_layer import ADPTNet, LayerSpec, Recurrent
from .autoencoder import AutoEncoder, AutoEncoderSpec
from .bidirectional import Bidirectional, BidirectionalSpec
from .block import BlockSpec, ResidualBlock
from .gated import Gated, GatedSpec, GatedState
from .layer import RecurrentLayer
from .mixer import Mixer, MixerSpec, MixerState
from .model import ModelSpec, SequenceModel
from .rnn import ADPTRNN, RNNSpec
from .spiking_layer import SpikingADPTNet
from .spiking_model import SpikingModel, SpikingModelSpec
from .spiking_presets import silif_for_speech, spiking_adpt_for_speech
from .stack import Stack, StackSpec
from .states import LayerStates
from .streaming import Streaming
from .swiglu import SwiGLUBlock, SwiGLUBlockSpec
from .variants import CoupledADPTNet, LinearADPTNet, TaylorADPTNet

__all__ = [
    "ADPTRNN",
    "ADPTNet",
    "AutoEncoder",
    "AutoEncoderSpec",
    "Bidirectional",
    "BidirectionalSpec",
    "BlockSpec",
    "CoupledADPTNet",
    "Gated",
    "GatedSpec",
    "GatedState",
    "LayerSpec",
    "LayerStates",
    "LinearADPTNet",
    "Mixer",
    "MixerSpec",
    "MixerState",
    "ModelSpec",
    "RNNSpec",
    "Recurrent",
    "RecurrentLayer",
    "ResidualBlock",
    "SequenceModel",
    "SpikingADPTNet",
    "SpikingModel",
    "SpikingModelSpec",
    "Stack",
    "StackSpec",
    "Streaming",
    "SwiGLUBlock",
    "SwiGLUBlockSpec",
    "TaylorADPTNet",
    "presets",
    "silif_for_speech",
    "spiking_adpt_for_speech",
]
