#!/bin/sh
# Init of a guest of cloud-hypervisor: writes and reads the borrowed disk, compares, and reports on the console.
# The host tells it what to do by block 0 of the disk's image: "reboot" or "off".
disk=/dev/nvme0n1
mkdir -p /tmp
busybox mount -t proc proc /proc
busybox mount -t sysfs sysfs /sys
busybox mount -t devtmpfs dev /dev
busybox mount -t tmpfs tmpfs /tmp
modprobe nvme
tries=0
until [ -b $disk ] || [ $tries = 300 ]; do
    tries=$((tries + 1))
    sleep 0.1
done
[ -b $disk ] || dmesg | tail -n 20

# A line is complete when it ends with a dot.
report() {
    echo "$* ."
}
# 1 MiB at each MiB but the first one.
sum() {
    dd if=$disk bs=64k skip=$((16 * $1)) count=16 iflag=direct 2>/dev/null | sha256sum | cut -c -64
}
errors() {
    dmesg | grep -iE 'I/O error|I/O tag|timeout|abort|controller is down|reset' | grep -i nvme
}

report "FOUND $(sum 1) $(cat /sys/block/nvme0n1/device/model)"
round=0
while :; do
    case $(dd if=$disk bs=4k count=1 iflag=direct 2>/dev/null | tr -d '\0') in
    reboot)
        dd if=/dev/zero of=$disk bs=4k count=1 oflag=direct 2>/dev/null
        action='reboot -f'
        break ;;
    off)
        action='poweroff -f'
        break ;;
    esac
    round=$((round + 1))
    at=$((1 + (round - 1) % 31))
    dd if=/dev/urandom of=/tmp/noise bs=64k count=16 2>/dev/null
    written=$(sha256sum </tmp/noise | cut -c -64)
    if ! dd if=/tmp/noise of=$disk bs=64k seek=$((16 * at)) oflag=direct conv=fsync,notrunc 2>/tmp/dd; then
        report "FAILED write of round $round: $(cat /tmp/dd)"
    fi
    read=$(sum $at)
    if [ "$written" = "$read" ]; then
        report "ROUND $round"
    else
        report "FAILED round $round: $written written, $read read"
    fi
done
report "LOG $(errors | wc -l) lines on errors"
errors
report "INTERRUPTS $(grep nvme0q /proc/interrupts | awk '{ sum += $2 } END { print sum }')"
report "KEPT $(sum 1)"
busybox $action
