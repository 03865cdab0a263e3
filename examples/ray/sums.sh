#!/bin/sh
# A tiny model learns sums on a Ray cluster: sh examples/ray/sums.sh starts one on this machine; with an address
# (auto, HOST:PORT or ray://HOST:PORT) it joins that one.
set -eu
rm -rf demo/ray
fivefold data arithmetic --below 10 --out demo/ray/data
fivefold train-tokenizer char --data demo/ray/data/train.parquet --out demo/ray/tokenizer
fivefold init-model qwen3 --tokenizer demo/ray/tokenizer --hidden 64 --layers 2 --out demo/ray/model
fivefold train examples/ray/sums.yaml ${1:+launch.ray.address=$1}
