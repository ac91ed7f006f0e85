//! Requests about tasks: looked up, answered, cancelled (SEP-2663).

use std::sync::Arc;

use http::{Response, StatusCode};
use mainstay_core::wire::envelope::error_message;
use mainstay_core::wire::modern::{INVALID_PARAMS, Meta, tasks};

use crate::engine::call::Request;
use crate::engine::conversation::TaskFault;
use crate::engine::modern::attendance::Attending;
use crate::engine::{Caller, Served};
use crate::serve::Front;
use crate::serve::modern::{self, Fault};
use crate::serve::reply::{self, Answer};

/// What is done with a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deed {
    Look,
    Update,
    Cancel,
}

impl Deed {
    /// The one that is called `method`; `None` for methods that the extension has not.
    pub(super) fn of(method: &str) -> Option<Self> {
        match method {
            "tasks/get" => Some(Self::Look),
            "tasks/update" => Some(Self::Update),
            "tasks/cancel" => Some(Self::Cancel),
            _ => None,
        }
    }
}

/// Answers a `request` about a task.
pub(super) async fn answer(
    front: &Arc<Front>,
    (caller, served): (&Caller, &Served),
    (request, meta): (&Request, &Meta),
    deed: Deed,
    _attending: Attending,
) -> Response<Answer> {
    let id = request.id();
    if !tasks::is_declared(&request.message, meta) {
        return Fault::missing_capability(format!("`{}` is not declared", tasks::EXTENSION), tasks::missing_data())
            .response(&id);
    }
    let Some(named) = request.param("taskId") else {
        return Fault::bad(INVALID_PARAMS, "`taskId` must be a string".to_owned()).response(&id);
    };
    let engine = &front.engine;
    let done = match deed {
        Deed::Look => engine.task_state((caller, served), (request, meta), &named).await,
        Deed::Update => engine.update_task((caller, served), request, &named).await,
        Deed::Cancel => engine.cancel_task((caller, served), request, &named).await,
    };
    match done {
        Ok(message) => reply::json(StatusCode::OK, message),
        Err(TaskFault::Refused(refused)) => modern::refuse(front, served, &refused, &id),
        Err(fault @ TaskFault::Unknown(_)) => {
            reply::json(StatusCode::OK, error_message(Some(&id), INVALID_PARAMS, &fault.to_string(), None).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4_the_methods_of_the_other_dialect_are_none_of_this_one() {
        assert_eq!(Deed::of("tasks/get"), Some(Deed::Look));
        for method in ["tasks/list", "tasks/result", "tasks/", "tools/call"] {
            assert_eq!(Deed::of(method), None, "{method}");
        }
    }
}
