# Makes a private copy of a root directory and becomes its first process. That process ends
# when its standard input is closed; then all processes inside end, and the mounts go.
#
# $1: an empty directory for mounts; $2: the root directory; then pairs of a directory of
# the machine and its mount point. $FARSIDE_HOST: the host name, if it has a separate one.
set -eu
cd "$1"
mount -t tmpfs -o mode=755 farside .
cd "$1"
mkdir lower upper work root
mount --bind "$2" lower
# Relative, so that no character of a path is special to overlayfs.
options=lowerdir=lower,upperdir=upper,workdir=work
# Root of a user namespace may not set trusted.overlay.*, without which a directory
# cannot replace one of the lower layer.
read -r _ outside _ < /proc/self/uid_map
[ "$outside" = 0 ] || options=$options,userxattr
mount -t overlay -o "$options" farside root
cd root
mount --rbind /dev dev
mount -t tmpfs -o mode=1777 farside dev/shm
mount --rbind /sys sys
mount -t tmpfs -o mode=755 farside run
mount -t tmpfs -o mode=1777 farside tmp
mkdir -m 1777 run/lock
shift 2
while [ $# -gt 0 ]; do
    mkdir -p ".$2"
    mount --rbind "$1" ".$2"
    shift 2
done
# Still in the machine's /proc: the process id there.
read -r outside _ < /proc/self/stat
mount -t proc proc proc
pivot_root . mnt
# bash reaps orphans, as a first process must. The host name is set by a system call:
# /proc/sys/kernel/hostname is not the user namespace's.
exec chroot . /bin/bash -c '
    [ -z "${FARSIDE_HOST-}" ] || hostname "$FARSIDE_HOST" || exit
    umount -l /mnt && echo "ready $1" && read -r _
' bash "$outside"
