#!/usr/bin/env bash
# Pre-training, then fine-tuning with and without it, two runs at a time: everything from texts to both reports.
# Wants text/reviews.txt, text/tuning.txt and text/held_out.txt in the current folder, a document a line.
set -euo pipefail
export OMP_NUM_THREADS=1
STEPS=${STEPS:-7000}
began=$SECONDS
say() { echo "$((SECONDS - began)) s: $*"; }

for part in tuning held_out; do
  share=0.03
  [ $part = held_out ] && share=0.99
  for kind in cloze_questions shuffled_sentences; do
    python examples/sets/of_plain_text.py $kind --text text/$part.txt --out sets/$kind/$part --dev_fraction $share --max_sentences 6
  done
done
mkdir -p cloze shuffled
for split in train dev; do
  cp sets/cloze_questions/tuning/$split.json cloze/$split.json
  cp sets/shuffled_sentences/tuning/$split.jsonl shuffled/$split.jsonl
done
cp sets/cloze_questions/held_out/dev.json cloze/test.json
cp sets/shuffled_sentences/held_out/dev.jsonl shuffled/test.jsonl
say "both sets made"

SIZE="model.init_args.embed_dim=128 model.init_args.head_dim=32 model.init_args.num_layers=2 model.init_args.mlp_dim=512
  model.init_args.norm_first=true model.init_args.norm_eps=1.0e-12"
TUNING="data.init_args.max_positions=128 data.init_args.batch_size=32 model.init_args.lr=1e-3
  model.init_args.warmup_steps=40 trainer.max_steps=400 trainer.val_check_interval=400 run.checkpoint_every=400"
PAIRS="data.init_args.path=shuffled data.init_args.max_length=64 data.init_args.allow_overlap=true"
CLOZE="data.init_args.path=cloze data.init_args.max_length=96 data.init_args.stride=32 data.init_args.max_query_length=40"
WITHOUT="softmax num_heads=4"
WITH="softmax num_heads=4 run.init_from=runs/pretrained/0/last"

pretrain() {
  lit-probattn fit --task bert_pretraining --attention softmax --model.init_args.attention.init_args.num_heads 4 \
    --data.init_args.path text/reviews.txt --data.init_args.documents line --data.init_args.vocab_limit 2000 \
    --data.init_args.max_positions 128 --data.init_args.max_length 64 --data.init_args.batch_size 16 \
    --data.init_args.val_fraction 0.01 --data.init_args.test_fraction 0.01 \
    --model.init_args.embed_dim 128 --model.init_args.head_dim 32 --model.init_args.num_layers 2 \
    --model.init_args.mlp_dim 512 --model.init_args.norm_first true --model.init_args.norm_eps 1.0e-12 \
    --model.init_args.dropout 0 --model.init_args.attention_dropout 0 --model.init_args.lr 2e-3 \
    --model.init_args.betas '[0.9,0.98]' --model.init_args.warmup_steps 500 \
    --trainer.max_steps "$STEPS" --trainer.val_check_interval 1000 --trainer.limit_val_batches 50 \
    --trainer.accelerator cpu --trainer.enable_progress_bar false --seed_everything 0 \
    --run.root runs --run.name pretrained --data.init_args.cache_dir cache
}
# tune KIND SEEDS ROW...
tune() {
  local kind=$1 seeds=$2 task=own_pairs metric=accuracy data=$PAIRS
  shift 2
  [ "$kind" = cloze ] && task=squad metric="exact_match f1" data=$CLOZE
  # shellcheck disable=SC2086
  lit-probattn compare --task $task --attention "$@" --seeds $seeds --metric $metric --runs runs \
    --out "${OUT_OF:-parts/$kind-$#-${seeds// /}}" --cache_dir cache --accelerator cpu \
    --set $SIZE data.init_args.tokenizer="$(echo cache/pretraining_text-*)" $TUNING $data
}

pretrain > pretrain.log 2>&1 && say "pre-training" &
first=$!
until [ -e cache/pretraining_text-*/tokeniser.npy ]; do
  kill -0 $first || { tail pretrain.log; exit 1; }
  sleep 1
done
tune pairs "0 1 2" "$WITHOUT" > without.log 2>&1 && say "pairs without, 3 seeds"
tune cloze "0 1 2" "$WITHOUT" >> without.log 2>&1 && say "cloze questions without, 3 seeds" &
second=$!
wait $first
tune cloze "0 1 2" "$WITH" > with.log 2>&1 && say "cloze questions with, 3 seeds" &
first=$!
wait $second
tune pairs "0 1" "$WITH" >> with-pairs.log 2>&1 && say "pairs with, seeds 0 and 1" &
second=$!
wait $first
tune pairs "2" "$WITH" > with-2.log 2>&1 && say "pairs with, seed 2"
wait $second
OUT_OF=out/cloze tune cloze "0 1 2" "$WITHOUT" "$WITH" > reports.log 2>&1 &
first=$!
OUT_OF=out/pairs tune pairs "0 1 2" "$WITHOUT" "$WITH" >> reports-pairs.log 2>&1
wait $first
say "both reports"
