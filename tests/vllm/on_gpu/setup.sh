# . tests/vllm/on_gpu/setup.sh FOLDER [SITE]: unpacks what build.py wrote to FOLDER, into SITE, and
# lets Python find it and this checkout. Half a minute, once for a machine.
site=${2:-/tmp/vllm-site}
if [ ! -e "$site/ready" ]; then
    mkdir -p "$site"
    tar -C "$site" -I 'xz -T0' -xf "$1/vllm.tar.xz"
    python3 -m compileall -q -j 0 "$site" >/dev/null 2>&1
    touch "$site/ready"
fi
export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH}
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export VLLM_USE_FLASHINFER_SAMPLER=0 # FlashInfer is not there
