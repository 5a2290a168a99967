//! Connection, session and a handler, tied together.

use super::connection::{Connection, ConnectionError};
use super::rate_limit::RateLimit;
use super::refusal::Fate;
use super::reply::Reply;
use super::request::Request;
use super::session::Session;
use super::{Errno, ReplyTo};

/// What serves requests.
pub trait Handler {
    /// Serves one request. Anything but a panic is a fine answer.
    fn handle(&mut self, request: Request<'_>, to: ReplyTo) -> Answer<'_>;
}

/// What a handler says.
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

/// Serves what has arrived, at most `budget` messages.
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
    static REFUSED: RateLimit = RateLimit::new();

    for _ in 0..budget {
        // A client that does not read is not served: it cannot make replies
        // pile up.
        if connection.wants_write() && !connection.flush()? {
            return Ok(Pumped::Full);
        }
        let Some(message) = connection.receive()? else {
            return Ok(Pumped::Idle);
        };
        let to = message.header.reply_to();
        match session.decode(message) {
            Ok(request) => match handler.handle(request, to) {
                Answer::Reply(reply) => connection.send(to, Ok(reply))?,
                Answer::Error(errno) => connection.send(to, Err(errno))?,
                Answer::Later => return Ok(Pumped::Later),
            },
            Err(refusal) => {
                if let Some(held_back) = REFUSED.allow() {
                    log::warn!("client request refused: {refusal}{held_back}");
                }
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
