//! Reservation notifications: one frame that asks for them, and one that answers.

use farside_medium::{Frame, Notifications};

use crate::block::BlockQueue;

/// What the lender was asked for, and its answer.
#[derive(Debug, Default)]
pub(super) struct Exchange {
    /// Of the controller, which answers are for.
    session: u32,
    /// The frame that asks, which goes over each connection.
    asks: Option<Frame>,
    /// Its number in the link, until it is answered.
    asked: Option<u64>,
    answer: Option<Notifications>,
}

impl Exchange {
    /// What came before for another session is void.
    pub(super) fn set_session(&mut self, session: u32) {
        if session != self.session {
            *self = Self {
                session,
                ..Self::default()
            };
        }
    }

    /// Returns whether the lender is to be asked: it was not yet, in this session.
    pub(super) fn set_notified(&mut self, upto: Option<u64>) -> bool {
        let asks = Some(Frame::Notified { upto });
        let was_asked = self.asks == asks && (self.asked.is_some() || self.answer.is_some());
        if !was_asked {
            (self.asks, self.asked, self.answer) = (asks, None, None);
        }
        !was_asked
    }

    /// The frame to send, as that number of a connection that has not had it.
    pub(super) fn ask(&mut self, number: u64) -> Option<Frame> {
        // With an answer, the next number is about to be known.
        let frame = self.asks.filter(|_| self.answer.is_none());
        self.asked = frame.map(|_| number);
        frame
    }

    /// Keeps the lender's answer. Returns whether there is one to take, or `None` if it cannot be one: the frame that asks is not among
    /// the `sent` first ones. Each answer may be followed by a question, which is in memory until it is sent.
    pub(super) fn answered(
        &mut self,
        session: u32,
        notifications: Notifications,
        sent: u64,
    ) -> Option<bool> {
        if session != self.session {
            // The session has ended while it was under way.
            return Some(false);
        }
        self.asked.filter(|frame| *frame < sent)?;
        (self.asked, self.answer) = (None, Some(notifications));
        Some(true)
    }

    pub(super) fn take(&mut self) -> Option<Notifications> {
        self.answer.take()
    }
}

impl BlockQueue {
    /// See [`Engine::set_notified`](crate::block::Engine::set_notified).
    pub fn set_notified(&mut self, upto: Option<u64>) {
        self.engine.set_notified(upto);
    }

    /// See [`Engine::take_notifications`](crate::block::Engine::take_notifications).
    pub fn take_notifications(&mut self) -> Option<Notifications> {
        self.engine.take_notifications()
    }
}
