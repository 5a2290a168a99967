//! Connection, session and a handler, tied together.

use super::connection::{Connection, ConnectionError, Message};
use super::header::{Header, MessageType};
use super::refusal::{Fate, Refusal};
use super::reply::Reply;
use super::request::Request;
use super::session::Session;
use super::{Errno, MAX_MESSAGE_SIZE, ReplyTo};

/// What serves requests.
pub trait Handler {
    /// Serves one request. May return any [`Answer`]; must not panic.
    fn handle(&mut self, request: Request<'_>, to: ReplyTo) -> Answer<'_>;

    /// Logs that a request was refused; [`Refusal::fate`] tells what follows. A client
    /// can cause any number of calls, so the lines must be limited
    /// ([`ClientLog`](super::ClientLog)).
    fn refused(&mut self, refusal: &Refusal);

    /// Takes a reply to a command of ours (see [`dma`](super::dma)). Returns
    /// whether it is to one; for a server that sends none it never is.
    fn reply(&mut self, header: &Header, payload: &[u8]) -> bool {
        let _ = (header, payload);
        false
    }
}

/// How a request is answered.
#[derive(Debug)]
pub enum Answer<'a> {
    /// Send this.
    Reply(Reply<'a>),
    /// Send this error.
    Error(Errno),
    /// The handler keeps the [`ReplyTo`] and answers by
    /// [`Connection::send`] when it can. Until then no further request may be
    /// taken from the connection: requests are processed in order ("Command
    /// Concurrency").
    Later,
}

/// Why [`pump`] stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pumped {
    /// Nothing more to do until the socket is readable.
    Idle,
    /// Replies wait until the socket is writable.
    Full,
    /// The budget is used up: call again after others had their turn.
    Budget,
    /// The handler answers the last request later.
    Later,
}

/// Serves what has arrived, at most `budget` messages. What arrives meanwhile may
/// be left: the socket becomes readable then, so an event loop may watch for edges.
/// It is readable when the client has gone, too, of which a loop that watches for
/// edges has to tell: [`Connection::expect_end`].
///
/// # Errors
///
/// When the connection is over; see [`ConnectionError`].
pub fn pump(
    connection: &mut Connection,
    session: &mut Session,
    handler: &mut impl Handler,
    budget: usize,
) -> Result<Pumped, ConnectionError> {
    for served in 0..budget {
        // Skip the recvmsg that would only return EAGAIN: whatever arrives later makes
        // the socket readable.
        if served > 0 && connection.is_emptied() && !connection.wants_write() {
            return Ok(Pumped::Idle);
        }
        // A client that does not read is not served: it cannot make replies
        // pile up.
        if connection.wants_write() && !connection.flush()? {
            return Ok(Pumped::Full);
        }
        let Some(message) = connection.receive()? else {
            return Ok(Pumped::Idle);
        };
        let to = message.header.reply_to();
        if to_handler(&message, handler) {
            continue;
        }
        match session.decode(message) {
            Ok(request) => match handler.handle(request, to) {
                Answer::Reply(reply) => connection.send(to, Ok(reply))?,
                Answer::Error(errno) => connection.send(to, Err(errno))?,
                Answer::Later => return Ok(Pumped::Later),
            },
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
    }
    Ok(Pumped::Budget)
}

/// Takes the replies to commands of ours that have arrived, up to the next
/// request: for while the last request waits for its answer. Returns whether
/// there is such a next request; if not, wait until the socket is readable.
///
/// # Errors
///
/// When the connection is over; see [`ConnectionError`].
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

/// Gives the handler a message that is a reply to a command of its own.
fn to_handler(message: &Message<'_>, handler: &mut impl Handler) -> bool {
    // Of a reply that is too long nothing was kept.
    message.header.message_type() == MessageType::Reply
        && message.header.size <= MAX_MESSAGE_SIZE
        && handler.reply(&message.header, message.payload)
}
