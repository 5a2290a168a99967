# In new user and mount namespaces: runs a program where `ip netns` works.
#
# /run is the machine's, where only its own root may make /run/netns. Names are
# resolved as before: /etc/resolv.conf may lead into /run.
set -eu
resolv=$(readlink -f /etc/resolv.conf || true)
[ ! -r "$resolv" ] || text=$(cat "$resolv")
mount -t tmpfs -o mode=755 farside /run
if [ -n "${text-}" ] && [ ! -e "$resolv" ]; then
    mkdir -p "$(dirname "$resolv")"
    echo "$text" > "$resolv"
fi
exec "$@"
