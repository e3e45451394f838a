#!/bin/sh
# First process of a lab host, started in namespaces of its own (mount, pid, ipc, uts, net).
# Builds the host's file tree, makes it the only one there is, prints its pid as the machine sees it, and stays.
#
#   first-process.sh ROOT NAME HIDDEN < paths of the machine to show read-only, one a line
#
# ROOT holds the host's own files and every mount point; HIDDEN is a path inside a shown one to cover, or empty.
set -eu
root=$1 name=$2 hidden=$3

# /proc is still the machine's, so this is the pid outside
read -r pid _ < /proc/self/stat
echo "$name" > /proc/sys/kernel/hostname

mount --bind "$root" "$root"
while IFS= read -r path; do
    mount -o bind,ro "$path" "$root$path"
done
if [ -n "$hidden" ]; then
    mount -t tmpfs -o ro,mode=0700,size=4k tmpfs "$root$hidden"
fi

mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"

# a /dev of its own: the machine's would bring its disks, and /dev/shm would be shared between the hosts
dev=$root/dev
mount -t tmpfs -o nosuid,mode=0755,size=64k tmpfs "$dev"
for device in null zero full random urandom tty; do
    : > "$dev/$device"
    mount --bind "/dev/$device" "$dev/$device"
done
mkdir "$dev/pts" "$dev/shm"
mount -t devpts -o newinstance,nosuid,noexec,mode=0620,ptmxmode=0666 devpts "$dev/pts"
mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs "$dev/shm"
ln -s pts/ptmx "$dev/ptmx"
ln -s /proc/self/fd "$dev/fd"
ln -s fd/0 "$dev/stdin"
ln -s fd/1 "$dev/stdout"
ln -s fd/2 "$dev/stderr"

# pivot_root and not chroot alone: a chroot can be left, and the machine's tree would still be there
cd "$root"
mkdir -p .machine
pivot_root . .machine
cd /
umount -l /.machine
rmdir /.machine

echo "$pid"
# with SIGCHLD ignored the kernel reaps what is handed to the first process
exec env --ignore-signal=CHLD sleep infinity < /dev/null > /dev/null 2>&1
