# . tests/support/unpack.sh NAME FOLDER [SITE]: unpacks FOLDER/NAME.tar.xz (gpu_pack.py) into SITE, and
# lets Python find it and this checkout. Half a minute, once for a machine.
site=${3:-/tmp/$1-site}
if [ ! -e "$site/ready" ]; then
    mkdir -p "$site"
    tar -C "$site" -I 'xz -T0' -xf "$2/$1.tar.xz"
    python3 -m compileall -q -j 0 "$site" >/dev/null 2>&1
    touch "$site/ready"
fi
export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH}
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
