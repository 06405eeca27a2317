# . tests/sglang/on_gpu/setup.sh FOLDER [SITE]: SGLang from what build.py wrote to FOLDER.
. tests/support/unpack.sh sglang "$@"
export SGLANG_FORCE_FUSED_OP_BACKEND=native # norms, activations and rotary embeddings of torch
