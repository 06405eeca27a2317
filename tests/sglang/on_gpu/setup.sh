# . tests/sglang/on_gpu/setup.sh FOLDER [SITE]: SGLang from what build.py wrote to FOLDER.
. tests/support/unpack.sh sglang "$@"
export SGLANG_FORCE_FUSED_OP_BACKEND=torch # norms, activations and rotary embeddings
export SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS=0 # else an engine that fails waits a minute
