#!/usr/bin/env bash
# The measurements that need a GPU, in calls of at most eight minutes.
#
#   MAELM_DATA=/my/data bench/gpu.sh [PART...]      until bench/gpu.sh; do [ $? = 75 ] || break; done
#
#   tests    the tests marked gpu
#   speed    the throughput table, shape by shape
#   suite    the scale's MAE-LM and RoBERTa: pretraining, GLUE, SQuAD 2.0, ranks; makes tokenizer and shards where missing
#   growth   speed against length and batch
#
# Without a PART, all parts run in this order. A call works on the remaining parts until its time is up and prints what is
# left. The next call resumes: pretraining from a checkpoint that SIGTERM saved, fine-tuning from its records, a test or a
# shape from its beginning. A failed part is repeated only if it is named.
#
# Exit code: 0 all parts are done; 75 call again; 1 a part failed and no other is left; 2 bad input.
#
#   MAELM_DATA      folder of corpus/*.parquet, glue/ and squad_v2/; finished shards may stand for the corpus
#   PYTHON          interpreter with torch; default .venv/bin/python, else python3
#   RESULTS         folder of records, tables, measured speeds, and logs in gpu/; default results
#   OUT             folder that gets all of these as one results.tar.gz at the end of every part; default none
#   WORK            folder of runs and checkpoints; WORK/parts lists the finished parts; default runs/suite/<scale>
#   PART_SECONDS    length of a call, default 480; a part that does not stop then is killed after GRACE seconds, default 90
#   SCALE           default medium
#   DEVICE=cpu      the same parts on a CPU, TESTS and SETTINGS permitting
#   TESTS           arguments of pytest for the part tests; default: the tests marked gpu, by their files
#   SPEED, GROWTH   expressions of pytest -k for these parts; default training_throughput, growth
#   SETTINGS        file with keys of yamls/suite/; its lists are appended to the scale's
set -uo pipefail

AGAIN=75
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

refuse() {
  echo "bench/gpu.sh: $1" >&2
  exit 2
}

absolute() { case $1 in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac }

scale=${SCALE:-medium} device=${DEVICE:-cuda} limit=${PART_SECONDS:-480} grace=${GRACE:-90}
work=$(absolute "${WORK:-$root/runs/suite/$scale}")
results=$(absolute "${RESULTS:-$root/results}")
settings=${SETTINGS:+$(absolute "$SETTINGS")}
out=${OUT:+$(absolute "$OUT")}
python=${PYTHON:-$root/.venv/bin/python}
if [ -z "${PYTHON:-}" ] && [ ! -x "$python" ]; then python=python3; fi
case $python in */*) python=$(absolute "$python") ;; esac
if [ -n "${MAELM_DATA:-}" ]; then
  MAELM_DATA=$(absolute "$MAELM_DATA")
  export MAELM_DATA
fi
cd "$root" || exit 2
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # for every process that a part starts, installed or not
export HF_HUB_OFFLINE=1
state=$work/parts logs=$results/gpu
# By their files, since pytest would import all others, too, and the packages that those need. A test compares the names.
gpu_tests='-m gpu tests/model/test_backends.py tests/sweep/test_run.py tests/training/test_run.py'

for number in "$limit" "$grace"; do
  [[ $number =~ ^[1-9][0-9]*$ ]] || refuse "PART_SECONDS and GRACE are whole seconds, not '$number'"
done
[[ $scale != ladder* ]] || refuse "SCALE=$scale has none of the artefacts that this script makes: maelm suite --scale $scale"
[ -f "yamls/suite/$scale.yaml" ] || refuse "no yamls/suite/$scale.yaml: SCALE names a suite"
named=$#
[ "$named" -gt 0 ] || set -- tests speed suite growth
for part in "$@"; do
  case $part in tests | speed | suite | growth) ;; *) refuse "no part $part: tests, speed, suite or growth" ;; esac
done
status_of() { if [ -f "$state/$1" ]; then cat "$state/$1"; fi }

if [[ " $* " == *' suite '* ]] && [ "$(status_of suite)" != passed ]; then
  [ -n "${MAELM_DATA:-}" ] || refuse 'MAELM_DATA is not set: it names a folder of corpus/*.parquet, glue/ and squad_v2/'
  for folder in glue squad_v2; do
    [ -d "$MAELM_DATA/$folder" ] || refuse "MAELM_DATA: no folder $MAELM_DATA/$folder"
  done
  case $scale in small*) shards=data/small ;; large_pp) shards=data/base_pp ;; *) shards=data/$scale ;; esac
  if ! compgen -G "${DATA_ROOT:-$MAELM_DATA}/corpus/*.parquet" >/dev/null && [ ! -f "$shards/manifest.json" ]; then
    refuse "no text: neither ${DATA_ROOT:-$MAELM_DATA}/corpus/*.parquet nor finished shards in $shards"
  fi
fi
case $device in
  cuda)
    export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES-0}" # one GPU, as the scale is planned for
    found=$("$python" -c 'import torch
print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU", sep=", ")' 2>&1) ||
      refuse "$python has no torch (${found##*$'\n'}): name an interpreter in PYTHON"
    found="torch ${found##*$'\n'}"
    if [[ $found == *', no GPU' ]]; then
      refuse "no GPU: ${found%, no GPU} sees none; DEVICE=cpu runs the same parts on a CPU"
    fi
    ;;
  cpu) export CUDA_VISIBLE_DEVICES='' found='the CPU' ;;
  *) refuse "DEVICE is cuda or cpu, not '$device'" ;;
esac
mkdir -p "$state" "$logs" ${out:+"$out"} || refuse "cannot write to $work, $results or $out"

child='' was_stopped='' has_begun='' is_over=''
left=() failed=()
trap 'was_stopped=1; if [ -n "$child" ]; then kill -TERM "$child" 2>/dev/null; fi' TERM INT

# part NAME NEED COMMAND...: the command, unless its end is recorded or the time is up.
# NEED: seconds without which it is not begun; the first of a call begins with whatever the call's start has left.
part() {
  local name=$1 need=$2 before remaining begun code
  shift 2
  before=$(status_of "$name")
  if [ "$before" = passed ]; then return; fi
  if [ "$before" = failed ] && [ "$named" = 0 ]; then
    failed+=("$name")
    return
  fi
  remaining=$((limit - SECONDS))
  if [ -z "$has_begun" ]; then need=1; fi
  if [ -n "$was_stopped$is_over" ] || [ "$remaining" -lt "$need" ]; then
    is_over=1
    left+=("$name")
    return
  fi
  echo "$name: begun, at most $remaining s; $logs/$name.log"
  begun=$SECONDS
  # --foreground: the command alone is told, and ends its own workers.
  timeout --foreground --signal="${signal:-TERM}" --kill-after="$grace" "$remaining" "$@" >>"$logs/$name.log" 2>&1 &
  child=$!
  if [ -n "$was_stopped" ]; then kill -TERM "$child"; fi # told before there was a child to tell
  wait "$child"
  code=$?
  while kill -0 "$child" 2>/dev/null; do # a signal to this script ended the first wait
    wait "$child"
    code=$?
  done
  child=''
  if [ "$code" = 0 ]; then
    echo passed >"$state/$name"
    echo "$name: passed in $((SECONDS - begun)) s"
  elif [ -n "$was_stopped" ] || { [[ $code =~ ^(124|137|143)$ ]] && [ $((SECONDS - begun)) -ge "$remaining" ]; }; then
    is_over=1
    if [ "$name" != suite ] && [ -z "$has_begun$was_stopped" ] && [ "$remaining" -ge $((limit * 9 / 10)) ]; then
      echo failed >"$state/$name"
      failed+=("$name")
      echo "$name: FAILED: it takes more than $remaining of PART_SECONDS=$limit, and cannot be divided"
    else
      left+=("$name")
      echo "$name: not done after $((SECONDS - begun)) s; the end of its log:"
      tail -n 5 "$logs/$name.log"
    fi
  else
    echo failed >"$state/$name"
    failed+=("$name")
    echo "$name: FAILED with exit code $code; the end of its log:"
    tail -n 15 "$logs/$name.log"
  fi
  has_begun=1
  pack
}

# pack: the archive in OUT, while there is time: what follows the last part (the plan, a list of shapes) may be killed.
pack() {
  local packed=() folder
  if [ -z "$out" ]; then return; fi
  for folder in gpu throughput "$scale"; do
    if [ -d "$results/$folder" ]; then packed+=("$folder"); fi
  done
  # A kill leaves the archive of the part before.
  tar -czf "$out/.results.tar.gz" -C "$results" "${packed[@]}" && mv "$out/.results.tar.gz" "$out/results.tar.gz" ||
    failed+=("$out/results.tar.gz")
}

# speeds PREFIX EXPRESSION: a part for every test of speed that pytest -k EXPRESSION finds.
speeds() {
  local answer ids id name
  answer=$("$python" -m pytest -q --collect-only -m throughput bench/test_throughput.py -k "$2" 2>&1)
  mapfile -t ids < <(grep '^bench/.*::' <<<"$answer")
  if [ ${#ids[@]} = 0 ]; then
    failed+=("$1")
    printf '%s: FAILED: no shape to measure\n%s\n' "$1" "$answer"
  fi
  for id in "${ids[@]}"; do
    name=$(printf '%s' "$1-${id#*::test_}" | tr -c 'A-Za-z0-9._' '-')
    part "${name%-}" 240 "$python" -m pytest -q -s "$id" --record --results "$results"
  done
}

suite() {
  local options=(--scale "$scale" --work "$work" --results "$results" ${settings:+--settings "$settings"})
  # those of two models; Table 2 and Figure 4 need 17
  part suite 60 "$python" -m pytest -q -s bench/test_{table1,table3,figure1,figure5,figure3}.py "${options[@]}"
  if [ "$(status_of suite)" != passed ]; then
    "$python" -m maelm_composer.cli suite "${options[@]}" --artefacts table1,table3,figure1,figure5,figure3 --plan
  fi
}

echo "bench/gpu.sh: $found; scale $scale"
for part in "$@"; do
  case $part in
    tests)
      # Interrupted by SIGINT, pytest still prints the failures that it has found.
      # shellcheck disable=SC2086 # several arguments
      signal=INT part tests 120 "$python" -m pytest -q ${TESTS:-$gpu_tests}
      ;;
    speed) speeds speed "${SPEED:-training_throughput}" ;;
    suite) suite ;;
    growth) speeds growth "${GROWTH:-growth}" ;;
  esac
done

if [ -z "$has_begun" ]; then pack; fi
if [ ${#failed[@]} -gt 0 ]; then echo "failed: ${failed[*]}"; fi
if [ ${#left[@]} -gt 0 ]; then
  echo "left: ${left[*]}; call again"
  exit $AGAIN
fi
if [ ${#failed[@]} -gt 0 ]; then exit 1; fi
echo "all is done: $results"
