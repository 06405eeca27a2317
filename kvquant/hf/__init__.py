"""Hugging Face transformers: its models decode from a kvquant cache, and are observed."""

from ..errors import missing_extra

try:
    import transformers
    from transformers.cache_utils import CacheLayerMixin

    if not hasattr(CacheLayerMixin, "get_max_length"):
        raise ImportError(f"this is transformers {transformers.__version__}")
except ImportError as error:
    raise missing_extra(
        "Hugging Face models need transformers 5.14 or newer", "hf", error
    ) from error
