"""Hugging Face classes around `SequenceModel`. Needs `pip install 'adptnet[hf]'`.

Importing this module registers the model type "adptnet" with the Auto classes of transformers.
"""

try:
    import transformers
except ImportError as error:
    raise ImportError("adptnet.integrations.hugging_face needs transformers: pip install 'adptnet[hf]'.") from error

from .cache import RecurrentCache
from .config import ADPTNetConfig
from .models import ADPTNetForCausalLM, ADPTNetForSequenceClassification, ADPTNetModel

__all__ = [
    "ADPTNetConfig",
    "ADPTNetForCausalLM",
    "ADPTNetForSequenceClassification",
    "ADPTNetModel",
    "RecurrentCache",
]

transformers.AutoConfig.register("adptnet", ADPTNetConfig)
transformers.AutoModel.register(ADPTNetConfig, ADPTNetModel)
transformers.AutoModelForCausalLM.register(ADPTNetConfig, ADPTNetForCausalLM)
transformers.AutoModelForSequenceClassification.register(ADPTNetConfig, ADPTNetForSequenceClassification)
