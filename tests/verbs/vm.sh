#!/usr/bin/env bash
# Runs a command in a VM whose kernel has soft-RoCE (rdma_rxe), for tests of verbs on machines without an RDMA NIC.
#
#   tests/verbs/vm.sh COMMAND...     boots, makes the devices, runs COMMAND, powers off; the status is COMMAND's
#   tests/verbs/vm.sh --health       rdma-core's own tests on rxe0: if these fail, the VM is to blame, not tokenyard
#   tests/verbs/vm.sh --self-test    what tokenyard's tests need of the VM (probe.c), and that status, output, working
#                                    directory and environment pass through
#   tests/verbs/vm.sh --setup        installs what is missing, as root on Debian
#
# As a cargo runner (tests are built outside and run inside):
#   CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=$PWD/tests/verbs/vm.sh cargo test --test verbs
# An absolute path, or one from the folder of Cargo.toml. cargo-nextest does not serve: it boots a VM for each test.
#
# Inside: two CPUs, emulated; COMMAND is root, memory may be locked without limit; standard input is empty. The
# machine's root is there read-only. /tmp shows the machine's, takes changes and loses them; /run, /var/tmp and /dev/shm
# start empty. Files that the machine changes meanwhile may look old inside.
#
#   device         net device    address                  reaches
#   rxe0           rx0           10.0.0.1                 itself
#   rxv0, rxv1     v0, v1        10.1.0.1, 10.1.0.2       each other, over a veth pair
#   rxv2, rxv3     v2, v3        10.1.2.1, 10.1.2.2       each other, over another
#
# GID index 1 is the IPv4 address (RoCE v2). `ip link set v1 down` takes the ports of rxv0 and rxv1 down, and up again.
#
# Passed on: the working directory; of the environment, the variables named TOKENYARD_*, RUST_*, FI_*, LD_LIBRARY_PATH,
# HOME. FI_UNIVERSE_SIZE is 8 unless it is given: libfabric over verbs asks for completion queues of as many peers, and
# soft-RoCE has none for its default of 256.
# Options are variables:
#   VM_TIMEOUT=300      seconds for boot and COMMAND together; then the VM is ended, and the status is 124
#   VM_OUT=FOLDER       a folder that COMMAND may write to: it is the machine's, at the same path
#   VM_CPUS=2 VM_MEMORY=2048 (MiB)
#   VM_CONSOLE=FILE     keeps the kernel's messages
#   VM_TIMES=1          tells on standard error how long boot and COMMAND took
#
# Status: COMMAND's; 124: out of time; 125: the VM did not boot, or its kernel died, or it could not be built; 77: the
# machine lacks something, and the tests are skipped (1 if TOKENYARD_STRICT=1).
#
# The kernel is Debian's linux-image, fetched by apt-get and not installed. It and the initramfs are kept in
# target/verbs-vm, and made anew when apt knows another kernel or these scripts change.
#
# What it costs, on two CPUs of a shared host that was busy (a load of 5 to 11 besides, all of this at nice 19):
#   kernel and initramfs     25 s, of which the download 3; once
#   boot                     10 to 21 s to the first line of COMMAND; start and end of QEMU, 2 s more
#   --health                 97 tests, 35 of them skipped: 45 s
#   --self-test              three runs of the probe 46 s; all of it, with two VMs at once, 100 s
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
cache=$root/target/verbs-vm

# A Debian package and a file of it.
PACKAGES=(
  qemu-system-x86:/usr/bin/qemu-system-x86_64
  busybox-static:/bin/busybox
  kmod:/sbin/modprobe
  cpio:/bin/cpio
  iproute2:/sbin/ip
  iproute2:/usr/bin/rdma
  util-linux:/usr/bin/setpriv
  xz-utils:/usr/bin/xz
  ibverbs-providers:/etc/libibverbs.d/rxe.driver
)
HEALTH_PACKAGES=(
  python3-pyverbs:/usr/lib/python3/dist-packages/pyverbs/__init__.py
  python3-pyverbs:/usr/share/doc/rdma-core/tests/run_tests.py
)
# What the tests over libfabric load from the machine's root.
LIBFABRIC_PACKAGES=(
  libfabric1:/usr/lib/x86_64-linux-gnu/libfabric.so.1
)
SELF_TEST_PACKAGES=(
  gcc:/usr/bin/gcc
  libibverbs-dev:/usr/include/infiniband/verbs.h
)
# What the initramfs holds, with what each depends on; init loads it.
MODULES=(virtio_pci virtio_console 9pnet_virtio 9p overlay crc32_generic dummy veth rdma_rxe ib_uverbs rdma_ucm)
# Seconds to wait for another vm.sh that makes the kernel and the initramfs: a download, and 20 seconds of work on an
# idle machine.
BUILD_LIMIT=300

say() { echo "tests/verbs/vm.sh: $*" >&2; }
die() {
  say "$@"
  exit 125
}
# The machine lacks something.
skip() {
  if [ "${TOKENYARD_STRICT:-}" = 1 ]; then
    say "$*"
    exit 1
  fi
  say "skipped: $*"
  exit 77
}

missing() {
  local entry
  for entry in "$@"; do [ -e "${entry#*:}" ] || echo "${entry%%:*}"; done | sort -u
}

# Skips unless the files of these packages are there.
need() {
  local packages
  packages=$(missing "$@" | tr '\n' ' ')
  [ -z "$packages" ] || skip "install Debian's ${packages% } (tests/verbs/vm.sh --setup does it as root)"
  [ "$(uname -m)" = x86_64 ] || skip "the VM is built for x86-64 machines, and this is $(uname -m)"
}

setup() {
  local packages
  mapfile -t packages < <(missing "${PACKAGES[@]}" "${HEALTH_PACKAGES[@]}" "${LIBFABRIC_PACKAGES[@]}" "${SELF_TEST_PACKAGES[@]}")
  if [ "${#packages[@]}" -gt 0 ]; then
    command -v apt-get >/dev/null || skip "no apt-get here to install ${packages[*]}"
    [ "$(id -u)" = 0 ] || skip "only root can install ${packages[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
  fi
  need "${PACKAGES[@]}" "${HEALTH_PACKAGES[@]}" "${LIBFABRIC_PACKAGES[@]}" "${SELF_TEST_PACKAGES[@]}"
  build
}

# Waits up to 5 s until these processes have ended.
all_gone() {
  local process tries left
  for ((tries = 0; tries < 50; tries++)); do
    left=
    for process in "$@"; do
      [ ! -e "/proc/$process" ] || grep -q '^State:.*Z' "/proc/$process/status" 2>/dev/null || left=1
    done
    [ -n "$left" ] || return 0
    sleep 0.1
  done
  return 1
}

# What this process started and made: ended and removed however it ends. Each child has a death signal as well, so that
# it goes even if this process is killed outright.
children=()
folder=
cleanup() {
  trap '' INT TERM HUP
  # How the children end is none of the caller's news.
  exec 2>/dev/null
  [ "${#children[@]}" -eq 0 ] || kill "${children[@]}" || true
  all_gone "${children[@]}" || kill -KILL "${children[@]}" || true
  [ -z "$folder" ] || rm -rf "$folder"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# The kernel's package and version, as apt knows them. To ask apt takes seconds: so only if its lists are newer than the
# answer that is kept.
kernel_package() {
  local answer=$cache/kernel package version
  if [ -s "$answer" ] && [ ! /var/lib/apt/lists -nt "$answer" ]; then
    cat "$answer"
    return 0
  fi
  if command -v apt-cache >/dev/null; then
    package=$(apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)$/\1/p')
    [ -z "$package" ] ||
      version=$(apt-cache show --no-all-versions "$package" 2>/dev/null | sed -n 's/^Version: //p')
  fi
  # Lists that are gone say nothing against the kernel that is here.
  if [ -z "${version:-}" ] && [ -s "$answer" ]; then
    cat "$answer"
  elif [ -z "${version:-}" ]; then
    return 1
  else
    echo "$package $version" | tee "$answer"
  fi
}

# Makes $cache/vmlinuz and $cache/initramfs unless they are of today's kernel and scripts. The lock is released once
# $vmlinuz and $initramfs are open files, which another build cannot take away.
build() {
  local kernel key
  { mkdir -p "$cache" && : >>"$cache/lock"; } 2>/dev/null ||
    die "$cache is not writable: the kernel and the initramfs are kept there"
  exec {lock}>>"$cache/lock"
  flock -w "$BUILD_LIMIT" "$lock" ||
    die "another vm.sh has been building in $cache for $BUILD_LIMIT s: see which process has its file lock open"
  kernel=$(kernel_package) ||
    skip "apt knows no linux-image-amd64, the VM's kernel: run apt-get update as root, on a Debian system"
  key="$kernel $(cat "$here/vm.sh" "$here/init" /bin/busybox | sha256sum | cut -d' ' -f1)"
  if [ "$(cat "$cache/key" 2>/dev/null)" != "$key" ]; then
    rm -f "$cache/key"
    initramfs_of "$kernel" >"$cache/build.log" 2>&1 || {
      local status=$?
      tail -n 20 "$cache/build.log" >&2
      [ "$status" -ne 77 ] || skip "$kernel could not be fetched by apt-get download"
      die "the initramfs of $kernel could not be built"
    }
    echo "$key" >"$cache/key"
  fi
  exec {vmlinuz}<"$cache/vmlinuz" {initramfs}<"$cache/initramfs"
  exec {lock}>&-
}

# Fetches the kernel and packs the initramfs. It runs as a condition, where -e does not hold: so each step says what
# follows if it fails.
initramfs_of() {
  local package=${1% *} version=${1#* } work=$cache/work release module file deb
  release=${package#linux-image-}
  rm -rf "$work"
  mkdir -p "$work"/root/{bin,proc,sys,dev,changes,root} || return 1
  deb=$cache/${package}_${version//:/%3a}_amd64.deb
  if [ ! -e "$deb" ]; then
    rm -f "$cache"/*.deb
    (cd "$work" && apt-get download -q -o APT::Sandbox::User="$(id -un)" "$package=$version") || return 77
    mv "$work"/*.deb "$deb" || return 1
  fi
  # Signed kernels of a later Debian have their modules in another folder: /usr/lib, to which /lib leads there.
  dpkg -x "$deb" "$work/kernel" || return 1
  [ -e "$work/kernel/lib" ] || ln -s usr/lib "$work/kernel/lib" || return 1
  depmod -b "$work/kernel" "$release" || return 1
  for module in "${MODULES[@]}"; do
    modprobe -d "$work/kernel" -S "$release" --show-depends "$module" || return 1
  done >"$work/modules" || return 1
  # Lines of --show-depends: "insmod FILE", or "builtin NAME".
  sed -n 's/^insmod \([^ ]*\).*/\1/p' "$work/modules" | sort -u >"$work/files"
  while read -r file; do
    module=$work/root/lib/modules/$release/${file#*"/lib/modules/$release/"}
    mkdir -p "$(dirname "$module")" && cp "$file" "$module" || return 1
    # The VM's modprobe reads no compressed ones.
    case $module in *.xz) xz -d "$module" || return 1 ;; esac
  done <"$work/files"
  cp "$work/kernel/lib/modules/$release"/modules.{order,builtin} "$work/root/lib/modules/$release" || return 1
  depmod -b "$work/root" "$release" || return 1
  cp /bin/busybox "$work/root/bin/busybox" || return 1
  cp "$here/init" "$work/root/init" && chmod 755 "$work/root/init" || return 1
  local applet
  for applet in $(/bin/busybox --list); do
    [ "$applet" = busybox ] || ln -s busybox "$work/root/bin/$applet" || return 1
  done
  unpacked "$work/kernel/boot/vmlinuz-$release" "$cache/vmlinuz" || return 1
  (set -o pipefail && cd "$work/root" && find . -print0 | cpio --null -o -H newc -R 0:0 --quiet | gzip -1) \
    >"$cache/initramfs" || return 1
  rm -rf "$work"
}

# The kernel's ELF file, which QEMU starts as it is (PVH), where the package holds it packed by xz: to unpack it in an
# emulated CPU takes 5 to 7 s of each boot. Another way of packing is left to the kernel itself.
unpacked() {
  local image=$1 to=$2 start
  start=$(LC_ALL=C grep -abom1 $'\xfd7zXZ' "$image" | head -n 1 | cut -d: -f1) || true
  if [ -n "$start" ] && xz -dc --single-stream < <(tail -c +$((start + 1)) "$image") >"$to" &&
    [ "$(head -c 4 "$to")" = $'\x7fELF' ]; then
    return 0
  fi
  cp "$image" "$to"
}

# The script that the VM runs, on standard output.
command_script() {
  local name
  echo 'export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin'
  echo 'export FI_UNIVERSE_SIZE=8'
  for name in $(compgen -e); do
    case $name in
      TOKENYARD_* | RUST_* | FI_* | LD_LIBRARY_PATH | HOME) printf 'export %s=%q\n' "$name" "${!name}" ;;
    esac
  done
  echo 'ulimit -l unlimited'
  printf 'cd %q && exec' "$PWD"
  printf ' %q' "$@"
  echo
}

console_tail() {
  say "the last lines of its console:"
  tail -n 25 "$folder/console" | tr -d '\r' | sed 's/^/  /' >&2
}

# Boots, runs the command that is given, and returns its status.
run() {
  need "${PACKAGES[@]}"
  local limit=${VM_TIMEOUT:-300} qemu timer ended started output=() options=()
  [[ $limit =~ ^[1-9][0-9]*$ ]] || die "VM_TIMEOUT=$limit is no number of seconds"
  build
  folder=$(mktemp -d)
  mkdir "$folder/job"
  command_script "$@" >"$folder/job/command"
  : >"$folder/status"
  if [ -n "${VM_OUT:-}" ]; then
    [ -d "$VM_OUT" ] || die "VM_OUT=$VM_OUT is no folder"
    options+=(-fsdev "local,id=results,path=${VM_OUT//,/,,},security_model=none,multidevs=remap")
    options+=(-device "virtio-9p-pci,fsdev=results,mount_tag=results")
    (cd "$VM_OUT" && pwd) >"$folder/job/results"
  fi
  # QEMU writes to pipes that cat empties into standard output and error: QEMU would truncate files, and would leave
  # them not blocking.
  exec {out}> >(exec setpriv --pdeathsig KILL cat)
  output+=($!)
  exec {err}> >(exec setpriv --pdeathsig KILL cat >&2 {out}>&-)
  output+=($!)
  children+=("${output[@]}")
  started=$SECONDS
  # TCG also where there is /dev/kvm: a VM of a cloud may have it and fail. tsc=reliable: both CPUs show the host's
  # counter, and any other clock would make each reading of the time a trap. The kernel's limits on speculation cost
  # time and protect nobody here. no_timer_check: on a busy host the timer's ticks come late, and the kernel would take
  # the timer for broken. A panic or an oops ends QEMU (-no-reboot).
  setpriv --pdeathsig KILL qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp "${VM_CPUS:-2}" \
    -m "${VM_MEMORY:-2048}" -nodefaults -no-user-config -display none -no-reboot \
    -kernel "/proc/self/fd/$vmlinuz" -initrd "/proc/self/fd/$initramfs" \
    -append "console=ttyS0 quiet tsc=reliable no_timer_check panic=-1 oops=panic mitigations=off nokaslr" \
    -serial "file:${folder//,/,,}/console" \
    -device virtio-serial-pci \
    -chardev "file,id=out,path=/proc/self/fd/$out" -device virtserialport,chardev=out,name=out \
    -chardev "file,id=err,path=/proc/self/fd/$err" -device virtserialport,chardev=err,name=err \
    -chardev "file,id=status,path=${folder//,/,,}/status" -device virtserialport,chardev=status,name=status \
    -fsdev local,id=root,path=/,security_model=none,readonly=on,multidevs=remap \
    -device virtio-9p-pci,fsdev=root,mount_tag=root \
    -fsdev "local,id=job,path=${folder//,/,,}/job,security_model=none,readonly=on" \
    -device virtio-9p-pci,fsdev=job,mount_tag=job "${options[@]}" \
    </dev/null >"$folder/qemu" 2>&1 &
  qemu=$!
  children+=("$qemu")
  exec {out}>&- {err}>&- {vmlinuz}<&- {initramfs}<&-
  setpriv --pdeathsig KILL sleep "$limit" </dev/null >/dev/null 2>&1 &
  timer=$!
  children+=("$timer")
  wait -n -p ended "$qemu" "$timer" || true
  local in_time=1
  [ "$ended" = "$qemu" ] || in_time=0
  kill -KILL "$qemu" "$timer" 2>/dev/null || true
  wait "$qemu" "$timer" 2>/dev/null || true
  # The rest of the output.
  wait "${output[@]}" 2>/dev/null || true
  children=()
  [ -z "${VM_CONSOLE:-}" ] || cp "$folder/console" "$VM_CONSOLE"
  conclude "$in_time" "$limit" "$((SECONDS - started))" "$1"
}

# Returns the status for what the VM reported.
conclude() {
  local in_time=$1 limit=$2 took=$3 name=$4 ready status ended failure
  ready=$(sed -n 's/^ready //p' "$folder/status")
  read -r status ended < <(sed -n 's/^exit //p' "$folder/status") || true
  failure=$(sed -n 's/^failed //p' "$folder/status")
  if [ -n "$status" ]; then
    if [ "${VM_TIMES:-}" = 1 ]; then
      say "boot $ready s, $name $(awk "BEGIN { print $ended - $ready }") s, with QEMU's start and end $took s"
    fi
    return "$status"
  fi
  if [ -s "$folder/qemu" ]; then sed 's/^/  /' "$folder/qemu" >&2; fi
  if [ -n "$failure" ]; then
    say "the VM did not boot: $failure"
  elif [ -z "$ready" ] && [ "$in_time" = 1 ]; then
    say "the VM did not boot"
  elif [ -z "$ready" ]; then
    say "the VM did not boot within $limit s (VM_TIMEOUT)"
  elif [ "$in_time" = 0 ]; then
    say "$name did not end within $limit s (VM_TIMEOUT; boot took $ready s of them): the VM was ended"
    return 124
  else
    say "the VM's kernel died while $name ran"
  fi
  console_tail
  return 125
}

# rdma-core's own tests of what tokenyard uses. What rxe lacks skips itself. Of the others, test_qpex fails: the library
# knows atomic writes, and kernel 6.1 does not.
health() {
  need "${PACKAGES[@]}" "${HEALTH_PACKAGES[@]}"
  run /bin/bash -ec '
    mkdir /tmp/rdma-core-tests
    cd /tmp/rdma-core-tests
    cp /usr/share/doc/rdma-core/tests/[!t]* .
    for module; do cp /usr/share/doc/rdma-core/tests/test_$module.py* .; done
    gunzip -f ./*.gz
    exec /usr/bin/python3 -W ignore run_tests.py --dev rxe0 --gid 1' \
    health addr cq cqex cq_events device fork mr pd qp relaxed_ordering
}

# A check of the self test: prints its name, or what was wrong.
check() {
  local name=$1
  shift
  if "$@"; then
    echo "ok  $name"
  else
    say "FAILED: $name"
    exit 1
  fi
}

# The processes that process $1 started.
children_of() { cat "/proc/$1/task/$1/children" 2>/dev/null || true; }

self_test() {
  need "${PACKAGES[@]}" "${SELF_TEST_PACKAGES[@]}"
  build
  exec {vmlinuz}<&- {initramfs}<&-
  folder=$(mktemp -d)
  gcc -std=gnu11 -Wall -Wextra -Werror -O1 -o "$folder/probe" "$here/probe.c" -libverbs ||
    die "probe.c does not compile"
  mkdir "$folder/a folder" "$folder/results"
  local value=$'two lines\nand a "quote\''
  {
    printf 'folder=%q value=%q\n' "$folder" "$value"
    cat <<'END'
set -eu
[ "$PWD" = "$folder/a folder" ]
[ "$TOKENYARD_SELF_TEST" = "$value" ]
[ -z "${SELF_TEST:-}" ]
[ "$(ulimit -l)" = unlimited ]
echo x >/tmp/file
echo x >/dev/shm/file
if touch "$HOME/tokenyard-self-test" 2>/dev/null; then exit 1; fi
echo result >"$folder/results/file"
echo "an error" >&2
seq 100000
printf 'no end of line'
"$folder/probe" rxe0 rxe0 >&2
"$folder/probe" rxv0 rxv1 v1 >&2
"$folder/probe" rxv2 rxv3 v2 >&2
exit 42
END
  } >"$folder/inside"
  # Another VM at the same time, which is killed in the end.
  VM_CONSOLE='' "$here/vm.sh" sleep 1000 2>/dev/null &
  local another=$! status=0 left
  children+=("$another")
  (cd "$folder/a folder" &&
    TOKENYARD_SELF_TEST=$value SELF_TEST=1 VM_OUT=$folder/results VM_TIMES=1 \
      "$here/vm.sh" bash "$folder/inside" >"$folder/out" 2> >(tee "$folder/err" >&2)) || status=$?
  check "the command's status, working directory and environment; locked memory, /tmp, /dev/shm, a read-only root" \
    [ "$status" = 42 ]
  check "its standard output, byte for byte" cmp <(seq 100000 && printf 'no end of line') "$folder/out"
  check "its standard error" [ "$(head -n 1 "$folder/err")" = "an error" ]
  check "a file in the folder VM_OUT" [ "$(cat "$folder/results/file")" = result ]
  left=$(children_of "$another")
  check "another VM at the same time" [ "$(wc -w <<<"$left")" -ge 2 ]
  kill "$another"
  status=0
  wait "$another" || status=$?
  check "the status of a vm.sh that is ended" [ "$status" = 143 ]
  # shellcheck disable=SC2086
  check "no process of it is left" all_gone $left
  status=0
  VM_TIMEOUT=1 VM_CONSOLE='' "$here/vm.sh" true 2>"$folder/err" || status=$?
  check "the status of a boot that takes too long" [ "$status" = 125 ]
  check "and its words" grep -q "did not boot within 1 s" "$folder/err"
}

case ${1:-} in
  --setup) setup ;;
  --health) health ;;
  --self-test) self_test ;;
  "" | -*)
    sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "$here/vm.sh" >&2
    exit 125
    ;;
  *) run "$@" ;;
esac
