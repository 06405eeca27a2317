"""Hugging Face transformers: models decode from a kvquant cache, and calibration observes them.

`import kvquant.hf`, or any name of kvquant that needs the hf extra, registers the attention
"kvquant" in transformers and wraps its `generate` (ids.py). A bare `import kvquant` does neither.
"""

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

from . import attention as attention  # registers "kvquant"
from . import ids as ids  # wraps generate
