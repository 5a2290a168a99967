//! Serves a connection's requests through a session and a handler.

use super::connection::{Connection, ConnectionError, Message};
use super::refusal::{Fate, Refusal};
use super::reply::Reply;
use super::request::Request;
use super::session::Session;
use super::{Errno, MAX_MESSAGE_SIZE, ReplyTo};
use farside_vfio_user_wire::{Header, MessageType};

/// So many processes may end in the middle of a request. Then it is answered with an error.
const MOST_TRIES: usize = 3;

/// Serves requests.
pub trait Handler {
    /// Serves one request. May return any [`Answer`]; must not panic.
    fn handle(&mut self, request: Request<'_>, to: ReplyTo) -> Answer<'_>;

    /// Logs a refused request; [`Refusal::fate`] has the consequence. A client can
    /// cause any number of calls, so log lines must be rate-limited
    /// ([`ClientLog`](super::ClientLog)).
    fn refused(&mut self, refusal: &Refusal);

    /// A request is answered with EIO: so many processes have ended while they processed it. The default logs that.
    fn given_up(&mut self, header: &Header, times: usize) {
        log::error!(
            "a request of the VMM ({:?}, {} bytes) has ended {times} processes: it is answered with an error",
            header.command,
            header.size
        );
    }

    /// Processes a reply to a command of the server (see [`dma`](super::dma)). Returns
    /// whether it matches one. The default is for servers that send none.
    fn reply(&mut self, header: &Header, payload: &[u8]) -> bool {
        let _ = (header, payload);
        false
    }
}

/// How a request is answered.
#[derive(Debug)]
pub enum Answer<'a> {
    /// Send this reply.
    Reply(Reply<'a>),
    /// Send an error reply.
    Error(Errno),
    /// The handler keeps the [`ReplyTo`] and calls [`Connection::send`] when the
    /// request is done. Until then no further request may be taken from the
    /// connection: requests are processed in order ("Command Concurrency").
    Later,
}

/// Why [`pump`] stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pumped {
    /// Wait until the socket is readable.
    Idle,
    /// Replies are queued: wait until the socket is writable.
    Full,
    /// The budget is exhausted: call again after serving other clients.
    Budget,
    /// The handler returned [`Answer::Later`].
    Later,
}

/// Serves the received messages, at most `budget`. Data that arrives meanwhile may be
/// left unread; it makes the socket readable again, so `EPOLLET` is sufficient. An
/// `EPOLLET` loop must call [`Connection::on_peer_shutdown`] on `EPOLLRDHUP`.
///
/// # Errors
///
/// Fails when the connection has ended; see [`ConnectionError`].
pub fn pump(
    connection: &mut Connection,
    session: &mut Session,
    handler: &mut impl Handler,
    budget: usize,
) -> Result<Pumped, ConnectionError> {
    // Messages of an earlier read may be left; what has arrived behind them may have been reported
    // while a request was held.
    connection.may_have_more();
    for served in 0..budget {
        // Skip the recvmsg that would only return EAGAIN: whatever arrives later makes
        // the socket readable.
        if served > 0 && connection.is_emptied() && !connection.wants_write() {
            return Ok(Pumped::Idle);
        }
        // Don't serve a client that does not read its replies.
        if connection.wants_write() && !connection.flush()? {
            return Ok(Pumped::Full);
        }
        let Some((message, tries)) = connection.receive_to_process()? else {
            return Ok(Pumped::Idle);
        };
        let header = message.header;
        let to = header.reply_to();
        if tries > MOST_TRIES {
            drop(message);
            handler.given_up(&header, tries - 1);
            connection.send(to, Err(Errno::IO))?;
            connection.end_try();
            continue;
        }
        if to_handler(&message, handler) {
            drop(message);
            connection.end_try();
            continue;
        }
        match session.decode(message) {
            Ok(request) => {
                let answer = handler.handle(request, to);
                match answer {
                    Answer::Reply(reply) => connection.send(to, Ok(reply))?,
                    Answer::Error(errno) => connection.send(to, Err(errno))?,
                    Answer::Later => {
                        connection.end_try();
                        return Ok(Pumped::Later);
                    }
                }
            }
            Err(refusal) => {
                handler.refused(&refusal);
                match refusal.fate() {
                    Fate::Ignore => {}
                    Fate::Reply => connection.send(to, Err(refusal.errno()))?,
                    Fate::ReplyThenClose => {
                        connection.send(to, Err(refusal.errno()))?;
                        return Err(ConnectionError::Protocol(refusal));
                    }
                }
            }
        }
        connection.end_try();
    }
    Ok(Pumped::Budget)
}

/// Processes received replies to the server's commands, up to the next request: for
/// use while the last request is unanswered. Returns whether a next request has
/// arrived; if not, wait until the socket is readable.
///
/// # Errors
///
/// Fails when the connection has ended; see [`ConnectionError`].
pub fn pump_replies(
    connection: &mut Connection,
    handler: &mut impl Handler,
) -> Result<bool, ConnectionError> {
    while let Some(header) = connection.peek()? {
        if header.message_type() != MessageType::Reply {
            return Ok(true);
        }
        if let Some(message) = connection.receive()? {
            to_handler(&message, handler);
        }
    }
    Ok(false)
}

/// Passes a reply to the handler. Returns whether the handler accepted it.
fn to_handler(message: &Message<'_>, handler: &mut impl Handler) -> bool {
    // The payload of a message above the limit has been discarded.
    message.header.message_type() == MessageType::Reply
        && message.header.size <= MAX_MESSAGE_SIZE
        && handler.reply(&message.header, message.payload)
}
