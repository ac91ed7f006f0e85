//! An answer of a child: waited for, and asked of the next child where that is safe.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;

use super::end::End;
use super::receipt::Receipt;
use super::running::Waiting;
use super::slot::Delivery;
use super::{Child, Tries};
use crate::call::{Call, Incoming};
use crate::failure::{Blame, Failure};

/// The messages of one call.
pub(crate) struct ChildStream {
    child: Arc<Child>,
    asked: Asked,
    tries: Tries,
    phase: Phase,
    ready: VecDeque<Incoming>,
    frame: Option<u64>,
    /// Of the question that came last.
    receipt: Option<Receipt>,
}

/// Who sent the call.
enum Asked {
    Here(Arc<Call>),
    /// An earlier worker: it is never sent again.
    Earlier,
}

enum Phase {
    Waiting(Waiting),
    /// Being sent to the next child. Kept here, so that a caller that looks away does not start it anew.
    Sending(Pin<Box<dyn Future<Output = Result<Waiting, Failure>> + Send>>),
    Over,
}

impl ChildStream {
    pub(super) fn new(child: Arc<Child>, call: Call, waiting: Waiting) -> Self {
        Self::of(child, Asked::Here(Arc::new(call)), waiting)
    }

    /// Of a call that an earlier worker sent.
    pub(super) fn rejoined(child: Arc<Child>, waiting: Waiting) -> Self {
        Self::of(child, Asked::Earlier, waiting)
    }

    fn of(child: Arc<Child>, asked: Asked, waiting: Waiting) -> Self {
        Self {
            child,
            asked,
            tries: Tries::default(),
            phase: Phase::Waiting(waiting),
            ready: VecDeque::new(),
            frame: None,
            receipt: None,
        }
    }

    /// The frame that the last message came in.
    pub(crate) fn frame(&self) -> Option<u64> {
        self.frame
    }

    /// See [`AnswerStream::take_receipt`](crate::AnswerStream::take_receipt).
    pub(crate) fn take_receipt(&mut self) -> Option<Receipt> {
        self.receipt.take()
    }

    pub(super) fn put_back(&mut self, incoming: Incoming) {
        self.ready.push_front(incoming);
    }

    /// See [`AnswerStream::next`](crate::AnswerStream::next).
    pub(crate) async fn next(&mut self) -> Result<Incoming, Failure> {
        loop {
            if let Some(incoming) = self.ready.pop_front() {
                return Ok(incoming);
            }
            match &mut self.phase {
                Phase::Over => return Err(self.child.over()),
                Phase::Sending(work) => {
                    let sent = work.await;
                    self.phase = Phase::Over;
                    self.phase = Phase::Waiting(sent?);
                }
                Phase::Waiting(waiting) => match waiting.next().await {
                    Delivery::Message { bytes, number } => {
                        self.frame = Some(number);
                        return Ok(Incoming::Message(bytes));
                    }
                    Delivery::Question { bytes, number } => {
                        self.frame = Some(number);
                        self.receipt = Some(waiting.receipt(number));
                        return Ok(Incoming::Message(bytes));
                    }
                    Delivery::Response { bytes, .. } => {
                        self.phase = Phase::Over;
                        if let Asked::Here(call) = &self.asked {
                            self.child.observe(call, &bytes);
                        }
                        return Ok(Incoming::Response(bytes));
                    }
                    Delivery::Oversize => {
                        self.phase = Phase::Over;
                        return Err(self.child.oversize());
                    }
                    Delivery::Gone => {
                        let frame = waiting.frame;
                        let end = waiting.running.ended().await;
                        self.phase = Phase::Over;
                        self.send_again(&end, frame)?;
                    }
                },
            }
        }
    }

    /// The child has ended: the call goes to the next one if this one never had it, or if twice is no harm (C3, U5).
    fn send_again(&mut self, end: &End, frame: Option<u64>) -> Result<(), Failure> {
        let Asked::Here(call) = &self.asked else { return Err(self.child.unknown(end.describe())) };
        self.child.spend(call, &mut self.tries, end, frame)?;
        let (child, call) = (Arc::clone(&self.child), Arc::clone(call));
        self.phase = Phase::Sending(Box::pin(async move { child.place(&call).await }));
        Ok(())
    }
}
