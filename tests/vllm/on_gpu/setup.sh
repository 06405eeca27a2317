# . tests/vllm/on_gpu/setup.sh FOLDER [SITE]: vLLM from what build.py wrote to FOLDER.
. tests/support/unpack.sh vllm "$@"
export VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 # FlashInfer is not there
