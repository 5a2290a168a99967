//! TCP connections, with timeouts for connecting and for dead peers.

use std::{
    io,
    net::{SocketAddr, TcpStream, ToSocketAddrs},
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

use rustix::net::sockopt;

/// Keepalive: idle time, interval, count.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(3), Duration::from_secs(2), 3);

/// TCP_USER_TIMEOUT: how long sent data may stay unacknowledged, or the peer's window
/// zero, before the connection is closed. As long as [`KEEPALIVE`] takes.
const DEAD_AFTER: Duration = Duration::from_secs(9);

/// Connects to the first address of `host` that accepts.
pub(crate) fn connect(host: &str, port: u16, timeout: Duration) -> io::Result<TcpStream> {
    let deadline = Instant::now() + timeout;
    let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
    let mut failed = io::Error::other("the name has no address");
    for (n, address) in addresses.iter().enumerate() {
        // An unresponsive address leaves time for the others.
        let left = deadline.saturating_duration_since(Instant::now());
        let share = left / (addresses.len() - n) as u32;
        match connect_to(*address, share) {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// Connects to `address`.
pub(crate) fn connect_to(address: SocketAddr, timeout: Duration) -> io::Result<TcpStream> {
    // Zero is an error.
    TcpStream::connect_timeout(&address, timeout.max(Duration::from_millis(1)))
}

/// Sets the options of all connections: nonblocking, no Nagle delay, and timeouts that
/// close the connection if the peer's host is dead.
pub(super) fn prepare(socket: &TcpStream) -> io::Result<()> {
    let (idle, interval, count) = KEEPALIVE;
    socket.set_nonblocking(true)?;
    socket.set_nodelay(true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, idle)?;
    sockopt::set_tcp_keepintvl(socket, interval)?;
    sockopt::set_tcp_keepcnt(socket, count)?;
    sockopt::set_tcp_user_timeout(socket, DEAD_AFTER.as_millis() as u32)?;
    Ok(())
}

/// The peer's address.
pub(super) fn peer(socket: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    let address = rustix::net::getpeername(socket)?;
    let address = address.and_then(|address| SocketAddr::try_from(address).ok());
    address.ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_host_is_detected_within_ten_seconds() {
        let (idle, interval, count) = KEEPALIVE;
        assert_eq!(idle + interval * count, DEAD_AFTER);
        assert!(DEAD_AFTER < Duration::from_secs(10));
    }

    #[test]
    fn connections_have_the_options_that_end_them() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let socket = connect("127.0.0.1", at.port(), Duration::from_secs(5)).unwrap();
        prepare(&socket).unwrap();
        assert!(socket.nodelay().unwrap());
        assert!(sockopt::socket_keepalive(&socket).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&socket).unwrap(), KEEPALIVE.0);
        assert_eq!(sockopt::tcp_keepintvl(&socket).unwrap(), KEEPALIVE.1);
        assert_eq!(sockopt::tcp_keepcnt(&socket).unwrap(), KEEPALIVE.2);
        let timeout = sockopt::tcp_user_timeout(&socket).unwrap();
        assert_eq!(u128::from(timeout), DEAD_AFTER.as_millis());
    }
}
