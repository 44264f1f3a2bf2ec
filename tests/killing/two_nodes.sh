#!/usr/bin/env bash
# Two nodes on one machine: two network namespaces, torchrun on each, a real ListOps fit over gloo.
#
#     sudo PY=.venv/bin/python bash tests/killing/two_nodes.sh
#
# First an undisturbed run. Then the same run again; in its middle, everything on the second node is
# ended with SIGKILL, as if the machine had lost power, and a few seconds later the node is started
# again. Ends with status 0 if the weights, the optimiser state and the order are equal bit for bit.
#
# Settings: PY (python), STEPS, KILL_AT (a step that is a multiple of EVERY), EVERY (steps between
# checkpoints), ATTENTION (a file of configs/attention), WORK (folder, kept; default temporary),
# DAMAGE (cut or flip: that checkpoint loses its end, or one byte of it changes, before the restart).
# Needs root, and `ip` of iproute2.
set -euo pipefail
cd "$(dirname "$0")/../.."
PY=${PY:-python} STEPS=${STEPS:-120} EVERY=${EVERY:-10} KILL_AT=${KILL_AT:-50}
ATTENTION=${ATTENTION:-mgk_soft_e}
WORK=${WORK:-$(mktemp -d)}
A=lpa-a-$$ B=lpa-b-$$
mkdir -p "$WORK"

in_namespace() { ip netns pids "$1" 2>/dev/null || true; }

clean_up() {
    for name in "$A" "$B"; do
        for process in $(in_namespace "$name"); do kill -9 "$process" 2>/dev/null || true; done
        ip netns del "$name" 2>/dev/null || true
    done
}
trap clean_up EXIT

ip netns add "$A" && ip netns add "$B"
ip link add "va$$" type veth peer name "vb$$"
ip link set "va$$" netns "$A" name veth0 && ip link set "vb$$" netns "$B" name veth0
ip -n "$A" addr add 10.78.0.1/24 dev veth0 && ip -n "$B" addr add 10.78.0.2/24 dev veth0
for name in "$A" "$B"; do ip -n "$name" link set lo up && ip -n "$name" link set veth0 up; done

# start_node NAMESPACE NUMBER RUN: torchrun on one node, in the background.
start_node() {
    ip netns exec "$1" env GLOO_SOCKET_IFNAME=veth0 OMP_NUM_THREADS=1 \
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \
        "$PY" -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --max-restarts=3 \
        --rdzv-backend=c10d --rdzv-id="$3" --rdzv-endpoint=10.78.0.1:29400 \
        --local-addr="10.78.0.$(($2 + 1))" \
        --rdzv-conf="is_host=$((1 - $2)),timeout=120,join_timeout=120" \
        -m lit_probattn fit --config configs/tasks/tiny/lra_listops.yaml \
        --config "configs/attention/$ATTENTION.yaml" \
        --trainer.accelerator cpu --trainer.devices 1 --trainer.num_nodes 2 \
        --trainer.strategy lightning.pytorch.strategies.DDPStrategy \
        --trainer.strategy.timeout 0:01:00 \
        --trainer.accumulate_grad_batches 2 --trainer.max_steps "$STEPS" \
        --trainer.val_check_interval 40 --trainer.enable_progress_bar false \
        --model.init_args.schedule_steps "$STEPS" --run.checkpoint_every "$EVERY" \
        --data.init_args.data_dir "$WORK/data" --data.init_args.cache_dir "$WORK/cache" \
        --run.root "$WORK/$3" --ckpt_path auto \
        >>"$WORK/$3-node$2.log" 2>&1 &
}

checkpoint_of() { printf "%s/%s/*/*/checkpoints/step-%08d.ckpt" "$WORK" "$1" "$2"; }

echo "undisturbed run"
start_node "$A" 0 quiet && first=$!
start_node "$B" 1 quiet && second=$!
wait "$first"
wait "$second"

echo "disturbed run"
start_node "$A" 0 disturbed && first=$!
start_node "$B" 1 disturbed && second=$!
for _ in $(seq 2400); do
    compgen -G "$(checkpoint_of disturbed "$KILL_AT")" >/dev/null && break
    sleep 0.05
done
for process in $(in_namespace "$B"); do kill -9 "$process" 2>/dev/null || true; done
{ wait "$second" || echo "node 1 killed after step $KILL_AT, status $?"; } 2>/dev/null
compgen -G "$(checkpoint_of disturbed "$STEPS")" >/dev/null && { echo "killed too late"; exit 1; }
if [ -n "${DAMAGE:-}" ]; then # the newest checkpoint suffers while nobody looks
    newest=$(ls "$WORK"/disturbed/*/*/checkpoints/step-*.ckpt | tail -1)
    "$PY" -m tests.killing.damage "$DAMAGE" "$newest"
fi
sleep 5
echo "node 1 started again"
start_node "$B" 1 disturbed && second=$!
wait "$first"
wait "$second"

grep -h "^error" "$WORK"/disturbed-node0.log | head -3 || true
grep -h "corrupt" "$WORK"/disturbed-node*.log | sed "s#$WORK/##g" | cut -c1-160 | head -2 || true
grep -h "^resuming" "$WORK"/disturbed-node*.log | sed "s#$WORK/##" | head -3
"$PY" -m tests.killing.compare_runs "$WORK/quiet" "$WORK/disturbed"
