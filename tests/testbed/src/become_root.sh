# In new user and mount namespaces: runs a command where `ip netns` works.
#
# /run is the machine's, and only the machine's root may create /run/netns. Name resolution
# keeps working: /etc/resolv.conf may be a link into /run.
set -eu
resolv=$(readlink -f /etc/resolv.conf || true)
[ ! -r "$resolv" ] || text=$(cat "$resolv")
mount -t tmpfs -o mode=755 farside /run
if [ -n "${text-}" ] && [ ! -e "$resolv" ]; then
    mkdir -p "$(dirname "$resolv")"
    echo "$text" > "$resolv"
fi
exec "$@"
