#!/usr/bin/env bash
# All that only real NICs between two hosts can show, within an hour: EFA (AWS p5, p5en), ConnectX (RoCE, InfiniBand),
# GDRCopy, and GPU memory that a NIC writes. Rows of a table at the end: passed, FAILED, or skipped with the reason.
#
#   tests/gpu.sh build DIR                                     on the build machine: the program and the test programs
#   tests/real.sh --dir DIR --peer HOST --transport NETWORK [OPTION...] [STEP...]
#                                                              on one of the two hosts, from a checkout
#
#   --peer HOST          the other host, which ssh reaches without a password
#   --transport NETWORK  libfabric:efa, or verbs or verbs:DEVICE,... (both hosts have devices of these names); with
#                        libfabric:tcp and SMALL=1 the script itself can be tried without NICs
#   --dir DIR            the programs (default: target/real); they are copied to the peer, and removed there at the end
#   --out OUT            folder for logs, JSON and tables (default: DIR/out)
#   --nics N             NICs of a rank (default: as many as its GPU has near it)
#   --gpus N             GPUs of each host, a rank each (default: as many as both hosts have; 0: the CPU device alone)
#   --machine NAME       folder of benches/results for the figures (default: by GPU, hosts and network)
#   --addr ADDR          address of this host that the peer reaches (default: as the peer's sshd sees it)
#   --port PORT          first TCP port that ranks meet on; a run takes some 200 (29611)
#   --allow-link-down    step links may take a NIC of this host down, some 12 s in all
#   --dry-run            prints every command in order, with its purpose, its limit and what counts as success
#
# Steps (default: all, in this order):
#            preflight  same programs, ports, kernel modules, locked memory, NICs; doctor and topology of both hosts
#            health     the network without tokenyard: fi_pingpong, or ib_write_bw and ibv_rc_pingpong
#            contract   the promises of the transport and killed ranks, on each host over its own device
#            wire       this library beside a bare loop, either host leading
#            links      a link that falls under load, with --allow-link-down
#            cpu        bench between the hosts with ranks on the CPU device, every element compared
#            gpu-host   the same with GPUs, arenas in host memory: 1, 32 and 128 tokens, and 4096
#            gpu        the same with arenas in GPU memory, if the library puts them there
#            kill       a rank dies on either host: the others name it, and a new generation works
#            gdrcopy    figures with and without words in GPU memory that GDRCopy maps
#            record     what was measured on GPUs and was right goes to benches/results/NAME, and the tables with it
#
# Variables: SSH (ssh -o BatchMode=yes -o ConnectTimeout=10): command that reaches the peer. SMALL=1: tiny calls, to try
# the script. TOKENYARD_*, FI_* and RUST_* go to both hosts. Status: 0 if no row failed.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=tests/rows.sh
source "$root/tests/rows.sh"

STEPS=(preflight health contract wire links cpu gpu-host gpu kill gdrcopy record)
# Seconds; an hour in all.
declare -A LIMITS=(
  [preflight]=240 [health]=300 [contract]=600 [wire]=240 [links]=120 [cpu]=480 [gpu-host]=480 [gpu]=480 [kill]=360
  [gdrcopy]=240 [record]=60
)

# A run takes some 200 ports from its first one on.
LAST_PORT=65300

die() {
  echo "tests/real.sh: $*" >&2
  exit 2
}

peer='' transport='' dir=$root/target/real out='' nics='' gpus='' machine='' here_addr='' there_addr='' port=29611
link_down=0 dry=0 steps=()
options() {
  while [ $# -gt 0 ]; do
    case $1 in
      --allow-link-down) link_down=1 ;;
      --dry-run) dry=1 ;;
      --peer | --transport | --dir | --out | --nics | --gpus | --machine | --addr | --port)
        [[ $# -ge 2 && $2 != -* ]] || die "$1 has no value: give one after it"
        case $1 in
          --peer) peer=$2 ;;
          --transport) transport=$2 ;;
          --dir) dir=$2 ;;
          --out) out=$2 ;;
          --nics) nics=$2 ;;
          --gpus) gpus=$2 ;;
          --machine) machine=$2 ;;
          --addr) here_addr=$2 ;;
          --port) port=$2 ;;
        esac
        shift
        ;;
      -*)
        sed -n '2,/^set/{/^#/p;}' "$0" >&2
        exit 2
        ;;
      *)
        [[ $1 =~ ^[a-z-]+$ && -n ${LIMITS[$1]:-} ]] || die "there is no step $1: give some of ${STEPS[*]}"
        steps+=("$1")
        ;;
    esac
    shift
  done
  [ -n "$peer" ] || die "--peer is missing: give the other host, or see --help"
  case $transport in
    libfabric:efa) net=efa ;;
    libfabric:tcp) net=tcp ;;
    verbs | verbs:?*)
      net=verbs
      [[ $transport =~ ^verbs(:[A-Za-z0-9_.-]+(,[A-Za-z0-9_.-]+)*)?$ ]] ||
        die "--transport is \`$transport\`: name devices by commas, as in verbs:mlx5_0,mlx5_1"
      ;;
    *) die "--transport is \`$transport\`: give libfabric:efa, verbs or verbs:DEVICE,..." ;;
  esac
  [[ -z $nics || $nics =~ ^[1-9]$ ]] || die "--nics is \`$nics\`: give a number of NICs of each rank"
  [[ $port =~ ^[1-9][0-9]{3,4}$ && $port -le $LAST_PORT ]] ||
    die "--port is \`$port\`: give a port from 1000 to $LAST_PORT"
  [[ -z $here_addr || $here_addr =~ ^[A-Za-z0-9.:%_-]+$ ]] ||
    die "--addr is \`$here_addr\`: give an address or a name of this host"
  [[ -z $gpus || $gpus =~ ^(0|[1-9][0-9]?)$ ]] || die "--gpus is \`$gpus\`: give a number of GPUs of each host, or 0"
  [[ -z $machine || $machine =~ ^[a-z0-9-]+$ ]] || die "--machine is \`$machine\`: give small letters, digits and -"
  [ ${#steps[@]} -gt 0 ] || steps=("${STEPS[@]}")
  out=${out:-$dir/out}
}

# ---- what runs on a host, here and there alike: text for bash -s

# The devices of verbs with an active first port, by commas.
active_devices() {
  local state found=()
  for state in /sys/class/infiniband/*/ports/1/state; do
    ! grep -q ACTIVE "$state" 2>/dev/null || found+=("$(basename "${state%/ports/1/state}")")
  done
  (IFS=, && echo "${found[*]}")
}

# The GID index of RoCE v2 over IPv4; 0 on InfiniBand.
gid_index() {
  local port=/sys/class/infiniband/$1/ports/1 type
  for type in "$port"/gid_attrs/types/*; do
    if grep -q 'RoCE v2' "$type" 2>/dev/null && grep -q '^0000:0000:0000:0000:0000:ffff:' "$port/gids/$(basename "$type")"
    then
      basename "$type"
      return
    fi
  done
  echo 0
}

# What a network needs of a host, a line each; false if something lacks.
facts() {
  local net=$1 lacks=0 locked module
  echo "kernel $(uname -r), $(nproc) CPUs, $(awk '/MemAvailable/ { print int($2 / 1048576) }' /proc/meminfo) GiB free"
  locked=$(ulimit -l)
  echo "locked memory: $locked KiB"
  if [ "$net" != tcp ] && [ "$locked" != unlimited ] && [ "$locked" -lt 1048576 ]; then
    echo "LACKS locked memory: raise memlock in /etc/security/limits.conf to unlimited, and log in again"
    lacks=1
  fi
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=index,name,pci.bus_id,driver_version --format=csv,noheader || lacks=1
    echo "kernel module nvidia: $(modinfo -F license nvidia 2>/dev/null || echo unknown) (dma-buf needs Dual MIT/GPL)"
  else
    echo "no nvidia-smi: no GPU is used"
  fi
  for module in nvidia_peermem gdrdrv efa mlx5_ib; do
    if grep -q "^$module " /proc/modules; then echo "module $module: loaded"; else echo "module $module: not loaded"; fi
  done
  case $net in
    efa)
      if command -v fi_info >/dev/null; then
        echo "EFA domains: $(fi_info -p efa 2>/dev/null | grep -c '^ *domain:') ($(fi_info --version | head -n 1))"
      else
        echo "no fi_info: install the EFA installer's libfabric"
      fi
      grep -q '^efa ' /proc/modules || { echo "LACKS the kernel module efa: install AWS's EFA installer" && lacks=1; }
      ;;
    verbs)
      echo "active devices: $(active_devices)"
      [ -n "$(active_devices)" ] || { echo "LACKS an active port: see ibv_devinfo" && lacks=1; }
      ;;
  esac
  [ "$lacks" = 1 ] || echo "nothing lacks"
  return "$lacks"
}

# Waits for one connection on a port, as rank 0 would.
listen() {
  timeout 25 python3 -c '
import socket, sys
server = socket.create_server(("", int(sys.argv[1])))
server.settimeout(24)
print("connected from", server.accept()[1][0])' "$1"
}

# Connects to a port, and again until somebody listens there.
connect() {
  local until=$((SECONDS + 20))
  while [ "$SECONDS" -lt "$until" ]; do
    ! timeout 5 bash -c "exec 3<>/dev/tcp/$1/$2" 2>/dev/null || return 0
    sleep 0.2
  done
  echo "port $2 of $1 cannot be reached: let TCP pass between the hosts" >&2
  return 1
}

# Runs a text in a bash of its own, for so many seconds.
run_one() {
  local pid status=0
  timeout --kill-after=10 "$1" bash -c "$(declare -f active_devices gid_index facts listen connect after_server)
$2" </dev/null &
  pid=$!
  echo "$pid" >"$SCRATCH/pids/$pid"
  wait "$pid" || status=$?
  rm -f "$SCRATCH/pids/$pid"
  return "$status"
}

# Runs a client once a server on the other host has had time to start.
after_server() { sleep 2 && "$@"; }

# The ranks FIRST and those after it, COUNT in all, each for LIMIT seconds; rank VICTIM is killed after some seconds.
# Prints what each wrote, its lines led by its number; the status is that of a rank that failed.
run_ranks() {
  local first=$1 count=$2 limit=$3 victim=$4 rank pids=() status worst=0 child
  shift 4
  for ((rank = first; rank < first + count; rank++)); do
    RANK=$rank LOCAL_RANK=$((rank - first)) timeout --kill-after=10 "$limit" "$@" </dev/null >"$SCRATCH/rank-$rank.log" 2>&1 &
    pids+=("$!")
    echo "$!" >"$SCRATCH/pids/$!"
  done
  if [ "$victim" -ge "$first" ] && [ "$victim" -lt $((first + count)) ]; then
    sleep "$KILL_AFTER"
    read -r child _ <"/proc/${pids[victim - first]}/task/${pids[victim - first]}/children"
    kill -KILL "$child"
  fi
  for ((rank = first; rank < first + count; rank++)); do
    status=0
    wait "${pids[rank - first]}" || status=$?
    rm -f "$SCRATCH/pids/${pids[rank - first]}"
    [ "$status" -eq 0 ] || worst=$status
    sed "s/^/[$rank] /" "$SCRATCH/rank-$rank.log"
    echo "[$rank] ended with status $status"
  done
  return "$worst"
}

# The beginning of every script for a host, whose programs are in the first folder, and what runs in the second.
prelude() {
  local name
  declare -f active_devices gid_index facts listen connect after_server run_one run_ranks
  for name in $(compgen -e); do
    case $name in
      TOKENYARD_TOKEN) ;;
      TOKENYARD_* | FI_* | RUST_*) printf 'export %s=%q\n' "$name" "${!name}" ;;
    esac
  done
  printf 'BIN=%q SCRATCH=%q KILL_AFTER=%s\n' "$1" "$2" "$kill_after"
  cat <<'END'
export PATH="$BIN:$PATH:/opt/amazon/efa/bin:/usr/local/cuda/bin:/usr/sbin:/sbin" CUDA_DEVICE_MAX_CONNECTIONS=32
mkdir -p "$SCRATCH/pids"
ulimit -l unlimited 2>/dev/null || true
for folder in /opt/amazon/efa/lib64 /opt/amazon/efa/lib; do
  [ -n "${TOKENYARD_LIBFABRIC:-}" ] || [ ! -e "$folder/libfabric.so.1" ] || export TOKENYARD_LIBFABRIC=$folder/libfabric.so.1
done
# The build machine's, where the host has none.
if [ -z "${TOKENYARD_LIBFABRIC:-}" ] && [ -e "$BIN/lib/libfabric.so.1" ] && ! ldconfig -p | grep -q 'libfabric\.so\.1'; then
  export LD_LIBRARY_PATH="$BIN/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
END
}

# ---- rows

# A command as a shell reads it.
quoted() {
  local word text=
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || printf -v word %q "$word"
    text+=" $word"
  done
  echo "${text:1}"
}

# Names the row whose commands follow: NAME LIMIT PURPOSE SUCCESS.
row() {
  name=$1 row_limit=$2
  [ "$dry" = 0 ] || printf '\n%s/%s  at most %s s\n  purpose  %s\n  success  %s\n' "$section" "$1" "$2" "$3" "$4"
}

show() { printf '  %-8s $ %s\n' "$1" "$2"; }

# Whether the row can run: a test for a host's bash, and what is lacking where it is false. A dry run assumes that it is
# true.
needs() {
  local where=$1 test=$2 lack=$3 place
  if [ "$dry" = 1 ]; then
    printf '  needs    %s (%s)\n' "$test" "$where"
    return 0
  fi
  for place in here there; do
    if [ "$where" = "$place" ] || [ "$where" = both ]; then
      if ! at "$place" <<<"$test" >/dev/null 2>&1; then
        note "$name" skipped "$place: $lack"
        return 1
      fi
    fi
  done
}

skip() {
  if [ "$dry" = 1 ]; then printf '\n%s/%s  skipped: %s\n' "$section" "$1" "$2"; else note "$1" skipped "$2"; fi
}

# Runs the script of stdin at a host.
at() {
  case $1 in
    here) { prelude "$dir" "$work" && cat; } | bash -s ;;
    there) { prelude "$remote" "$remote" && cat; } | "${SSH[@]}" "$peer" bash -s ;;
  esac
}

# Runs two scripts, here and there, until both have ended; the status is of one that failed.
# shellcheck disable=SC2016
BOTH='there=$2 here=$1; shift 2
"$@" bash -s <"$there" &
peer=$! status=0
bash -s <"$here" || status=$?
wait "$peer" || status=$?
exit "$status"'

# Makes the row of what two files of commands give, here and there; either may be empty. `judge` looks at the log.
run_row() {
  local left start=$SECONDS status=0 result=passed judge=${1:-by_status}
  if time_left "$name"; then
    { prelude "$dir" "$work" && cat "$work/here.part"; } >"$work/here.sh"
    { prelude "$remote" "$remote" && cat "$work/there.part"; } >"$work/there.sh"
    # Each rank has its own limit, at the end of which it is killed where it runs.
    timeout --kill-after=10 $((left + 20)) bash -c "$BOTH" both "$work/here.sh" "$work/there.sh" "${SSH[@]}" "$peer" \
      >"$out/$name.log" 2>&1 || status=$?
  else
    status=1
  fi
  "$judge" "$status" || result=FAILED
  row_result=$result
  [ "$result" = passed ] && [ "$judge" = figures ] ||
    note "$name" "$result" "$((SECONDS - start)) s  $(telling_line "$name" "$result")"
}

# The line of a row's log that says most: of rank 0 if all is well, else of a rank that failed.
telling_line() {
  local lines rank=0
  lines=$(grep -v -e '^$' -e '^\[[0-9]*\] $' -e 'ended with status' "$out/$1.log") || true
  if [ "$2" = passed ]; then
    grep -q '^\[0\] ' <<<"$lines" || rank=
  else
    rank=$(sed -n 's/^\[\([0-9]*\)\] ended with status [1-9].*/\1/p' "$out/$1.log" | head -n 1)
  fi
  [ -z "$rank" ] || lines=$(grep "^\[$rank\] " <<<"$lines") || true
  tail -n 1 <<<"$lines" | tr -s ' ' | cut -c1-110
}

by_status() {
  # A test program of which a filter leaves no test ends well.
  [ "$1" -eq 0 ] && ! grep -q 'running 0 tests' "$out/$name.log"
}

# One or both hosts run a command: here, there or both.
on() {
  local where=$1 text
  shift
  text=$(quoted "$@")
  run_text "$where" "$text" "$text"
}

# The same with a text for each host, which its bash reads.
run_text() {
  local where=$1 here=$2 there=$3
  if [ "$dry" = 1 ]; then
    [ "$where" = there ] || show here "$here"
    [ "$where" = here ] || show there "$there"
    return
  fi
  [ "$where" != there ] || here=true
  [ "$where" != here ] || there=true
  printf 'run_one %s %q\n' "$row_limit" "$here" >"$work/here.part"
  printf 'run_one %s %q\n' "$row_limit" "$there" >"$work/there.part"
  run_row
}

# Ranks of both hosts: GPUs or processes of each host, the host that has rank 0, variables, and the command.
# `judge` and `victim` may be set by the caller.
ranks() {
  local each=$1 first=$2 variables=() master world=$((2 * $1)) text from_here=0 from_there=$1 variable
  shift 2
  while [ "$1" != -- ]; do
    variables+=("$1")
    shift
  done
  shift
  text=$(quoted "$@")
  if [ "$dry" = 1 ]; then
    [ "$first" = here ] || { from_here=$each from_there=0; }
    show ranks "$text"
    printf '           RANK %s to %s here, %s to %s there%s\n' "$from_here" $((from_here + each - 1)) "$from_there" \
      $((from_there + each - 1)) "${variables:+, with ${variables[*]}}"
    return
  fi
  master=$here_addr
  [ "$first" = here ] || { from_here=$each from_there=0 master=$there_addr; }
  port=$((port + 4))
  local common
  common=$(
    printf 'export WORLD_SIZE=%s LOCAL_WORLD_SIZE=%s TOKENYARD_NODES=%s,%s MASTER_ADDR=%q TOKENYARD_PORT=%s\n' \
      "$world" "$each" "$each" "$each" "$master" "$port"
    printf 'export TOKENYARD_TOKEN=%s TOKENYARD_TIMEOUT_MS=60000\n' "$token"
    for variable in "${variables[@]}"; do printf 'export %s=%q\n' "${variable%%=*}" "${variable#*=}"; done
  )
  printf '%s\nrun_ranks %s %s %s %s %s\n' "$common" "$from_here" "$each" "$row_limit" "${victim:--1}" "$text" >"$work/here.part"
  printf '%s\nrun_ranks %s %s %s %s %s\n' "$common" "$from_there" "$each" "$row_limit" "${victim:--1}" "$text" >"$work/there.part"
  run_row "${judge:-by_status}"
}

# A row for each result of the row's JSON.
figures() {
  local line
  [ "$1" -eq 0 ] || return 1
  lines=$(python3 "$root/benches/figures.py" lines "$out/$name.json" 2>/dev/null) || return 1
  while read -r line; do note "$name" passed "$line"; done <<<"$lines"
}

# Calls that are compared in every iteration.
ALL="every rank ends with status 0: every element of every iteration was right"
SOME="rank 0 ends with status 0 and writes JSON: every 16th iteration was compared and right"

# The calls' shape, prefill's tokens, and seconds after which a rank is killed in the middle of a bench.
small=() many=4096 kill_after=8
[ "${SMALL:-}" != 1 ] || small=(--hidden 256 --experts 16 --top-k 4) many=64 kill_after=3

# A bench between the hosts: NAME LIMIT RANKS-OF-A-HOST PURPOSE SUCCESS [VARIABLE...] -- OPTION... The caller may set
# `need` and `lack`, as for needs.
between() {
  local label=$1 limit=$2 each=$3 purpose=$4 success=$5 variables=()
  shift 5
  while [ "$1" != -- ]; do
    variables+=("$1")
    shift
  done
  shift
  row "$label" "$limit" "$purpose" "$success"
  [ -z "${need:-}" ] || needs both "$need" "$lack" || return 0
  ranks "$each" here "${variables[@]}" -- tokenyard bench --launch env --world $((2 * each)) --ranks-per-node "$each" \
    --transport "$transport" ${nics:+--nics "$nics"} "$@" "${small[@]}"
}

# The same with JSON.
figure() {
  local label=$1 judge=figures
  rm -f "$out/$label.json"
  between "$@" --json "$out/$label.json"
}

# ---- steps

step_preflight() {
  local host
  row facts 30 "what the network needs of both hosts: kernel, locked memory, GPUs, modules, NICs" "no line says LACKS"
  run_text both "facts $net" "facts $net"
  row port-here 30 "TCP from the peer to this host, where rank 0 listens" "the peer connects"
  run_text both "listen $port" "connect $here_addr $port"
  row port-there 30 "TCP to the peer, where ranks meet once rank 0 is lost" "this host connects"
  run_text both "connect $there_addr $port" "listen $port"
  for host in here there; do
    row "doctor-$host" 60 "what tokenyard finds and lacks" "status 0; read its lines on GDRCopy, dma-buf, NICs and memlock"
    on "$host" tokenyard doctor
  done
  row topology-here 30 "NICs and cores of each GPU; the record can join tests/data/topology" "status 0"
  on here tokenyard topology --record "$out/topology-here"
  row topology-there 30 "the same of the peer" "status 0"
  on there tokenyard topology --record "$remote/topology"
  [ "$dry" = 1 ] || "${SSH[@]}" "$peer" cat "$remote/topology" </dev/null >"$out/topology-there" || true
}

step_health() {
  local device
  case $net in
    efa)
      row pingpong 60 "EFA by libfabric's own program: if this fails, tokenyard is not to blame" "both ends end with status 0"
      needs both "command -v fi_pingpong" "needs fi_pingpong, of the EFA installer" &&
        run_text both "after_server fi_pingpong -p efa -e rdm -I 1000 $there_addr" "fi_pingpong -p efa -e rdm -I 1000"
      row gpudirect 60 "EFA writes GPU memory, by fabtests" "both ends end with status 0"
      needs both "command -v fi_rma_bw && command -v nvidia-smi" "needs fi_rma_bw of fabtests, built with CUDA, and a GPU" &&
        run_text both "after_server fi_rma_bw -p efa -e rdm -o writedata -D cuda -S 65536 $there_addr" \
          "fi_rma_bw -p efa -e rdm -o writedata -D cuda -S 65536"
      ;;
    verbs)
      for device in "${devices[@]}"; do
        row "pingpong-$device" 30 "verbs by rdma-core's own program: if this fails, tokenyard is not to blame" "both ends end with status 0"
        needs both "command -v ibv_rc_pingpong" "needs ibv_rc_pingpong: install ibverbs-utils" &&
          run_text both "after_server ibv_rc_pingpong -d $device -g \$(gid_index $device) $there_addr" \
            "ibv_rc_pingpong -d $device -g \$(gid_index $device)"
        row "bandwidth-$device" 30 "what the link gives to bare writes" "both ends end with status 0; compare with its rate"
        needs both "command -v ib_write_bw" "needs ib_write_bw: install perftest" &&
          run_text both "after_server ib_write_bw -d $device -D 3 --report_gbits $there_addr" "ib_write_bw -d $device -D 3 --report_gbits"
        row "gpudirect-$device" 30 "the same into GPU memory" "both ends end with status 0; compare with the row above"
        needs both "ib_write_bw --help 2>&1 | grep -q use_cuda && command -v nvidia-smi" "needs perftest built with CUDA, and a GPU" &&
          run_text both "after_server ib_write_bw -d $device --use_cuda=0 -D 3 --report_gbits $there_addr" \
            "ib_write_bw -d $device --use_cuda=0 -D 3 --report_gbits"
      done
      ;;
    tcp) skip pingpong "tcp needs no device" ;;
  esac || true
}

# A test program on both hosts at once, over each host's own device: NAME LIMIT PURPOSE VARIABLES PROGRAM FILTER
# [OPTION...]
tested() {
  local variables=$4
  row "$1" "$2" "$3" "every test passes on both hosts"
  shift 4
  needs both "command -v $1" "needs the test program $1: build it by tests/gpu.sh build" || return 0
  run_text both "env $variables $(quoted "$@")" "env $variables $(quoted "$@")"
}

# shellcheck disable=SC2016
step_contract() {
  local efa='TOKENYARD_TEST_EFA=${TOKENYARD_LIBFABRIC:-libfabric.so.1}' verbs
  verbs="TOKENYARD_TEST_VERBS=$(IFS=, && echo "${devices[*]:0:4}")"
  case $net in
    efa)
      tested contract 200 "the promises that proxies rely on, four NICs in one process" "$efa" \
        transport efa::four_nics --test-threads=1
      tested contract-processes 200 "the same, each endpoint in a process" "$efa" transport efa::between_processes --test-threads=1
      tested kills 200 "ranks of one host die at random points over the device, and the others go on" \
        "$efa TOKENYARD_KILL_RUNS=20" calls kills::a_death_anywhere_over_the_double_of_efa
      ;;
    verbs)
      tested contract 200 "the promises that proxies rely on, over one device" "$verbs" verbs one_device --test-threads=1
      tested contract-pairs 200 "the same between devices, with two NICs" "$verbs" verbs two_pairs --test-threads=1
      tested contract-processes 100 "the same, each endpoint in a process" "$verbs" verbs between_processes --test-threads=1
      tested kills 200 "ranks of one host die at random points over the device, and the others go on" \
        "$verbs TOKENYARD_KILL_RUNS=10" calls kills::a_death_anywhere_over_verbs
      ;;
    tcp)
      tested contract 200 "the promises that proxies rely on" "TOKENYARD_STRICT=1" transport libfabric::tcp:: --test-threads=1
      ;;
  esac
}

step_wire() {
  local short=()
  [ "${SMALL:-}" != 1 ] || short=(--pairs 2 --slice-ms 5)
  row "wire-$net" 100 "what tokenyard adds to a bare loop over the network, this host leading" "status 0: each row is within its bar"
  ranks 1 here -- tokenyard wire --launch env --transport "$transport" "${short[@]}" --json "$out/wire-$net.json"
  row "wire-$net-back" 100 "the same, the peer leading" "status 0: each row is within its bar"
  ranks 1 there -- tokenyard wire --launch env --transport "$transport" "${short[@]}"
}

# The net device of a verbs device's first port.
net_device() { cat "/sys/class/infiniband/$1/ports/1/gid_attrs/ndevs/0" 2>/dev/null || echo none; }

step_links() {
  local device net_device=NETDEVICE layer
  if [ "$net" != verbs ]; then
    skip links "a host cannot take down a link of $net"
  elif [ "$link_down" = 0 ]; then
    skip links "it takes a NIC of this host down: give --allow-link-down"
  elif [ "${#devices[@]}" -lt 2 ]; then
    skip links "needs two devices, of which one stays up: give --transport verbs:DEVICE,DEVICE"
  else
    device=${devices[1]}
    row links 110 "the link of $device falls 6 times under load on this host: each write arrives once" "the test passes"
    if [ "$dry" = 0 ]; then
      layer=$(cat "/sys/class/infiniband/$device/ports/1/link_layer" 2>/dev/null || echo unknown)
      net_device=$(net_device "$device")
      if [ "$layer" != Ethernet ] || [ "$net_device" = none ] || [ "$(id -u)" != 0 ]; then
        skip links "needs root and an Ethernet port with a net device; the port of $device is $layer"
        return
      fi
      if ip route get "$there_addr" | grep -qw "$net_device" || ip route show default | grep -qw "$net_device"; then
        skip links "this host's own connection goes through $net_device, of $device: name another device second"
        return
      fi
    fi
    taken_down=$net_device
    run_text here "env TOKENYARD_TEST_VERBS=$(IFS=, && echo "${devices[*]:0:4}") TOKENYARD_TEST_LINK=$net_device verbs links::" true
    [ "$dry" = 1 ] || ip link set "$net_device" up
    taken_down=
  fi
}

step_cpu() {
  local few=(--device cpu --check all --timeout-ms 60000) tokens=1,32,128 four=4 iters=10
  [ "${SMALL:-}" != 1 ] || tokens=1,16 four=2 iters=2
  between "cpu-decode-2x1-$net" 120 1 "DeepSeek-V3's shape, a rank on each host's CPU device: the network alone" "$ALL" -- \
    "${few[@]}" --tokens "$tokens" --iters "$iters"
  between "cpu-decode-2x$four-$net" 120 "$four" "several ranks a host, which forward and sum" "$ALL" -- \
    "${few[@]}" --tokens "$tokens" --iters "$iters"
  between "cpu-ragged-2x$four-$net" 60 "$four" "counts that differ, masked layout, bf16" "$ALL" -- \
    "${few[@]}" --tokens "${tokens##*,}" --iters "$iters" --ragged --layout masked --dtype bf16
  between "cpu-split-2x2-$net" 60 2 "split calls, token-major layout, quantisation, small chunks" "$ALL" -- \
    "${few[@]}" --tokens "${tokens##*,}" --iters "$iters" --mode split --layout token --quantize --chunk-rows 8
  between "cpu-prefill-2x1-$net" 180 1 "large messages" "$ALL" -- "${few[@]}" --tokens "$many" --iters 2
}

# Whether there is a GPU on both hosts.
have_gpus() {
  [ "$dry" = 1 ] || [ "$gpus" -gt 0 ] || {
    skip "$section" "no GPU on one of the hosts, or --gpus 0"
    return 1
  }
}

# Correctness in several ways and the figures, arenas where the options put them: SUFFIX OPTION...
on_gpus() {
  local suffix=$1 place=2x$gpus
  shift
  between "checked-$place-$suffix" 90 "$gpus" "counts that differ, every element compared" "$ALL" -- \
    --device cuda "$@" --tokens 64 --iters 20 --warmup 2 --check all --ragged
  between "checked-masked-$place-$suffix" 90 "$gpus" "masked layout, bf16, split calls" "$ALL" -- \
    --device cuda "$@" --tokens 64 --iters 20 --warmup 2 --check all --layout masked --dtype bf16 --mode split
  figure "decode-$place-$suffix" 150 "$gpus" "decode steps of DeepSeek-V3's shape" "$SOME" -- \
    --device cuda "$@" --tokens 1,32,128
  figure "decode-graph-$place-$suffix" 90 "$gpus" "the same from CUDA graphs" "$SOME" -- \
    --device cuda "$@" --tokens 128 --mode graph
  figure "prefill-$place-$suffix" 150 "$gpus" "prefill of DeepSeek-V3's shape" "$SOME" -- \
    --device cuda "$@" --tokens "$many" --iters 100 --warmup 10
}

step_gpu-host() {
  have_gpus || return 0
  on_gpus "$net-host" --arena host
}

step_gpu() {
  have_gpus || return 0
  figure "arena-2x$gpus-$net" 60 "$gpus" "where the library puts arenas" "$SOME" -- --device cuda --tokens 1 --iters 10 --warmup 2
  if [ "$dry" = 0 ]; then
    if [ "$row_result" != passed ]; then return; fi
    if grep -q '"arena":"host"' "$out/arena-2x$gpus-$net.json"; then
      skip "gpu" "arenas are in host memory: see the doctors' lines on dma-buf and transports"
      return
    fi
  fi
  on_gpus "$net"
}

# Whether a killed rank's survivors all failed with its name: status, by the row's log.
survivors_name_it() {
  local rank
  for ((rank = 0; rank < survivors; rank++)); do
    [ "$rank" != "$named" ] || continue
    grep -q "^\[$rank\] tokenyard: .*rank $named\b" "$out/$name.log" || return 1
    grep -q "^\[$rank\] ended with status 1$" "$out/$name.log" || return 1
  done
  grep -q "^\[$named\] ended with status 137$" "$out/$name.log"
}

# The same where ranks form a new generation.
survivors_go_on() {
  local rank
  for ((rank = 0; rank < survivors; rank++)); do
    [ "$rank" != "$named" ] || continue
    grep -q "^\[$rank\] error .*peer: Rank($named)" "$out/$name.log" || return 1
    grep -q "^\[$rank\] masked well$" "$out/$name.log" || return 1
  done
  grep -q "^\[$named\] ended with status 137$" "$out/$name.log"
}

step_kill() {
  # Survivors wait their deadline out.
  local long=(--device cpu --tokens 32 --check first --timeout-ms $((${SMALL:-0} == 1 ? 10000 : 20000)))
  local survivors=4 named point device=cpu variables again=20
  if [ "${SMALL:-}" = 1 ]; then again=2; else long+=(--hidden 1024 --experts 32 --top-k 4); fi
  [ "${gpus:-0}" = 0 ] || device=cuda
  for named in 3 0; do
    judge=survivors_name_it victim=$named between "bench-without-rank-$named" 60 2 \
      "rank $named of 4 is killed $kill_after s after the start of a bench" "each other rank ends with status 1 and a sentence that names it" -- \
      "${long[@]}" --iters 1000000
  done
  between bench-again 60 2 "the network after that, by new processes" "every rank ends with status 0" -- "${long[@]}" --iters "$again"
  variables=()
  [ "$net" != verbs ] || variables=("TOKENYARD_TEST_VERBS=${devices[0]}")
  # Where rank dies, and which one: of the peer, of this host, and the first.
  while read -r point named; do
    row "$point-$named" 60 "rank $named of 4 dies there, in a round over the network" \
      "each other rank names it, and dispatches and combines in a new generation without it"
    needs both "command -v calls" "needs the test program calls: build it by tests/gpu.sh build" || continue
    judge=survivors_go_on ranks 2 here "${variables[@]}" TOKENYARD_TEST_DEVICE=$device TOKENYARD_TEST_KILL_POINT="$point" \
      TOKENYARD_TEST_KILL_VICTIM="$named" TOKENYARD_TEST_KILL_DELAY_US=0 TOKENYARD_TEST_KILL_NETWORK="$net" -- \
      calls kills::rank --exact --nocapture --test-threads=1
  done <<<"AfterBuild 2
AfterDispatchSend 3
AfterCombineSend 1
AfterRound 0"
}

step_gdrcopy() {
  have_gpus || return 0
  local place=2x$gpus
  row doctor 30 "the doctors on GDRCopy" "both have it"
  needs both "[ -e /dev/gdrdrv ]" "no /dev/gdrdrv: load GDRCopy's kernel module" &&
    run_text both "tokenyard doctor | grep '^has  *GDRCopy'" "tokenyard doctor | grep '^has  *GDRCopy'"
  figure "decode-$place-$net-gdr-off" 100 "$gpus" "words that proxies write in host memory" "$SOME" TOKENYARD_GDRCOPY=off -- \
    --device cuda --tokens 1,128
  need="[ -e /dev/gdrdrv ]" lack="no /dev/gdrdrv: load GDRCopy's kernel module" \
    figure "decode-$place-$net-gdr" 100 "$gpus" "the same in GPU memory, mapped by GDRCopy: compare with the row above" \
    "$SOME" TOKENYARD_GDRCOPY=require -- --device cuda --tokens 1,128
}

step_record() {
  local folder=$root/benches/results/$machine file kept=()
  row record 60 "figures of this run join benches/results/$machine, and the tables of README.md and docs/figures.md" \
    "status 0; look at git diff, and commit"
  if [ "$dry" = 1 ]; then
    show here "cp $out/{decode,prefill,wire}-*.json $folder/"
    show here "python3 benches/figures.py readme"
    return
  fi
  for file in "$out"/{decode,prefill,wire}-*.json; do
    # A row that failed may leave results that are wrong.
    if grep -qs " $(basename "$file" .json) *passed" "$out"/table-*.txt; then kept+=("$file"); fi
  done
  if [ "${SMALL:-}" = 1 ] || [ ${#kept[@]} -eq 0 ]; then
    skip record "no figures, or SMALL=1"
    return
  fi
  mkdir -p "$folder"
  cp "${kept[@]}" "$folder/"
  check record python3 "$root/benches/figures.py" readme
}

# ---- the whole

work='' remote='' taken_down=''
cleanup() {
  trap '' INT TERM HUP
  [ -z "$taken_down" ] || ip link set "$taken_down" up || true
  local end='for file in "$1"/pids/*; do [ ! -e "$file" ] || kill "$(basename "$file")" 2>/dev/null; done; true'
  if [ -n "$remote" ]; then
    # shellcheck disable=SC2029
    "${SSH[@]}" "$peer" "bash -c $(printf %q "$end") cleanup $remote; rm -rf $remote" </dev/null 2>/dev/null || true
  fi
  if [ -n "$work" ]; then
    bash -c "$end" cleanup "$work"
    rm -rf "$work"
  fi
}

# Reaches the peer, and puts the same programs there.
meet() {
  local program found programs=() libraries=() sums
  for program in tokenyard transport calls verbs; do
    if [ -x "$dir/$program" ]; then programs+=("$program"); fi
  done
  [ -x "$dir/tokenyard" ] || die "there is no $dir/tokenyard: build it by tests/gpu.sh build $dir"
  command -v python3 >/dev/null || die "there is no python3 here, which reads results"
  mkdir -p "$out"
  work=$(mktemp -d)
  # shellcheck disable=SC2016
  found=$("${SSH[@]}" "$peer" 'echo "$SSH_CONNECTION" && mktemp -d /tmp/tokenyard-real.XXXXXX' </dev/null) ||
    die "$peer cannot be reached by ${SSH[*]}: set up a key, or see SSH in --help"
  remote=$(tail -n 1 <<<"$found")
  [[ $remote =~ ^/tmp/tokenyard-real\.[A-Za-z0-9]+$ ]] || die "$peer made no folder for programs: $found"
  read -r found _ there_addr _ <<<"$(head -n 1 <<<"$found")"
  here_addr=${here_addr:-$found}
  [ -n "$here_addr" ] && [ -n "$there_addr" ] || die "$peer names no addresses by SSH_CONNECTION: give --addr"
  [ ! -d "$dir/lib" ] || libraries=(lib)
  tar -C "$dir" -cf - "${programs[@]}" "${libraries[@]}" | "${SSH[@]}" "$peer" "tar -C $remote -xf -"
  sums=$(cd "$dir" && sha256sum "${programs[@]}")
  "${SSH[@]}" "$peer" "cd $remote && sha256sum -c --quiet" <<<"$sums" || die "the programs on $peer are not those of $dir"
  echo "$(cd "$dir" && ./tokenyard --version) on this host ($here_addr) and $peer ($there_addr)"
}

# GPUs of a host.
count_gpus() { nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true; }

# What options leave open: devices, GPUs, the folder of results.
choose() {
  local here there kind
  devices=()
  if [ "$net" = verbs ]; then
    case $transport in
      verbs) IFS=, read -ra devices <<<"$(if [ "$dry" = 1 ]; then echo mlx5_0; else active_devices; fi)" ;;
      *) IFS=, read -ra devices <<<"${transport#verbs:}" ;;
    esac
    [ ${#devices[@]} -gt 0 ] || die "no device of verbs has an active port here: see ibv_devinfo"
  fi
  if [ "$dry" = 1 ]; then
    gpus=${gpus:-8} machine=${machine:-MACHINE} here_addr=${here_addr:-HERE} there_addr=THERE remote=FOLDER
    return
  fi
  here=$(count_gpus)
  there=$({ declare -f count_gpus && echo count_gpus; } | "${SSH[@]}" "$peer" bash -s)
  [ -n "$gpus" ] || gpus=$((here < there ? here : there))
  if [ "$gpus" -gt "$here" ] || [ "$gpus" -gt "$there" ]; then die "--gpus is $gpus: this host has $here, and $peer $there"; fi
  kind=cpu
  [ "$gpus" = 0 ] || kind=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr '[:upper:] ' '[:lower:]-' |
    sed 's/nvidia-//; s/-.*//')
  machine=${machine:-$kind-2x$gpus-$net}
}

main() {
  local section table deadline row_limit name devices token net row_result tables=() started=$SECONDS status=0
  read -ra SSH <<<"${SSH:-ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15}"
  options "$@"
  if [ "$dry" = 0 ]; then
    trap cleanup EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap 'exit 129' HUP
    meet
  fi
  choose
  # Strangers on the ranks' ports are turned away.
  token=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
  for section in "${steps[@]}"; do
    if [ "$dry" = 1 ]; then
      printf '\n== %s, at most %s s\n' "$section" "${LIMITS[$section]}"
    else
      echo "== $section [$((SECONDS - started)) s]"
      table=$out/table-$section.txt
      : >"$table"
      tables+=("$table")
    fi
    deadline=$((SECONDS + LIMITS[$section]))
    "step_$section"
    [ "$dry" = 1 ] || cat "$table"
  done
  [ "$dry" = 0 ] || return 0
  printf '\n%s, %s x 2 GPUs, %s s; logs in %s\n' "$transport" "$gpus" "$((SECONDS - started))" "$out"
  cat "${tables[@]}"
  # 1: there is none in all of the tables. 2: one of them cannot be read.
  grep -q ' FAILED ' "${tables[@]}" || status=$?
  [ "$status" -eq 1 ]
}

main "$@"
