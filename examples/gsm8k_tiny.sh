#!/bin/sh
# GSM8K from local files: sh examples/gsm8k_tiny.sh TRAIN.jsonl TEST.jsonl; without them from the hub.
set -eu
rm -rf demo/gsm8k
if [ $# -ge 2 ]; then set -- --source "$@"; fi
fivefold data gsm8k "$@" --out demo/gsm8k/data
fivefold train-tokenizer bpe --vocabulary 2048 --data demo/gsm8k/data/train.parquet --out demo/gsm8k/tokenizer
fivefold init-model qwen3 --tokenizer demo/gsm8k/tokenizer --hidden 64 --layers 2 --out demo/gsm8k/model
fivefold train examples/gsm8k_tiny.yaml
fivefold report demo/gsm8k/run
