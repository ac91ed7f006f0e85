//! How an id that is not known is answered: the dialects of servers in the field.

use super::{Body, Response};
use http::{HeaderName, HeaderValue, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use serde_json::{Value, json};

/// Which requests get the dialect's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum When {
    /// Those with an id that is not known.
    Unknown,
    /// All, `initialize` included.
    Always,
}

/// An answer of which every byte is given.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Dialect {
    /// For which requests.
    pub when: When,
    /// Whether an unknown id is taken for a new session instead.
    pub adopt: bool,
    status: u16,
    headers: Vec<(String, String)>,
    body: String,
}

impl Default for Dialect {
    fn default() -> Dialect {
        preset("404-32001-null").unwrap_or(Dialect {
            when: When::Unknown,
            adopt: false,
            status: 404,
            headers: Vec::new(),
            body: String::new(),
        })
    }
}

impl Dialect {
    /// Reads `{"preset": NAME}` or `{"status", "headers", "content_type", "body", "when"}`. In the body the string `"$id"`
    /// stands for the id of the request that is answered.
    pub(super) fn read(order: &Value) -> Result<Dialect, String> {
        let mut dialect = match order["preset"].as_str() {
            Some(name) => preset(name).ok_or_else(|| format!("no preset `{name}`"))?,
            None => written(order)?,
        };
        match order["when"].as_str() {
            None => {}
            Some("unknown") => dialect.when = When::Unknown,
            Some("always") => dialect.when = When::Always,
            Some(other) => return Err(format!("no such `when`: `{other}`")),
        }
        Ok(dialect)
    }

    /// The answer to a request with this id (`null` if it had none).
    pub(super) fn response(&self, id: &Value) -> Response {
        let body = self.body.replace("\"$id\"", &id.to_string());
        let mut response = Response::new(whole(body));
        *response.status_mut() = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        for (name, value) in &self.headers {
            if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
                response.headers_mut().append(name, value);
            }
        }
        response
    }
}

/// A body of these bytes.
pub(super) fn whole(bytes: impl Into<bytes::Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed()
}

/// A JSON-RPC error as an HTTP answer.
pub(super) fn refusal(status: u16, code: i64, message: &str, id: &Value) -> Response {
    json_response(status, &json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}}))
}

/// A JSON document as an HTTP answer.
pub(super) fn json_response(status: u16, body: &Value) -> Response {
    text_response(status, "application/json", body.to_string())
}

/// Bytes of any type as an HTTP answer.
pub(super) fn text_response(status: u16, content_type: &'static str, body: impl Into<bytes::Bytes>) -> Response {
    let mut response = Response::new(whole(body));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    if !content_type.is_empty() {
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    }
    response
}

fn written(order: &Value) -> Result<Dialect, String> {
    let status = order["status"].as_u64().and_then(|status| u16::try_from(status).ok()).ok_or("no status")?;
    let body = match order["body"].as_str() {
        Some(text) => text.to_owned(),
        None if order["body"].is_null() => String::new(),
        None => order["body"].to_string(),
    };
    let mut headers = Vec::new();
    let guessed = if order["body"].is_object() { "application/json" } else { "text/plain" };
    headers.push(("content-type".to_owned(), order["content_type"].as_str().unwrap_or(guessed).to_owned()));
    for (name, value) in order["headers"].as_object().into_iter().flatten() {
        headers.push((name.clone(), value.as_str().unwrap_or_default().to_owned()));
    }
    Ok(Dialect { when: When::Unknown, adopt: false, status, headers, body })
}

fn preset(name: &str) -> Option<Dialect> {
    let error = |status, id: &str, code: i64, message: &str| {
        let body = json!({"jsonrpc": "2.0", "id": if id.is_empty() { Value::Null } else { json!(id) },
                          "error": {"code": code, "message": message}});
        dialect(status, "application/json", body.to_string())
    };
    let text = |status, text: &str| dialect(status, "text/plain; charset=utf-8", text.to_owned());
    Some(match name {
        "404-32001-null" => error(404, "", -32001, "Session not found"),
        "404-32600-string" => error(404, "server-error", -32600, "Session not found"),
        "404-text" => text(404, "Not Found: Session not found"),
        "410" => text(410, "Gone"),
        "400-32000-json" => error(400, "", -32000, "Bad Request: No valid session ID provided"),
        "400-32000-sse" => {
            let frame = json!({"jsonrpc": "2.0", "id": null,
                               "error": {"code": -32000, "message": "Bad Request: Server not initialized"}});
            dialect(400, "text/event-stream", format!("event: message\ndata: {frame}\n\n"))
        }
        "401-session" => text(401, "Unauthorized: Session not found"),
        "503-32001" => error(503, "", -32001, "Session not found"),
        "500" => error(500, "", -32603, "Internal server error"),
        "500-text" => text(500, "Internal Server Error"),
        "200-32600" => error(200, "$id", -32600, "Session not found"),
        "200-32004" => error(200, "$id", -32004, "Session expired"),
        "401-challenge" => {
            let mut challenge = error(401, "", -32001, "Unauthorized");
            let value = "Bearer error=\"invalid_token\"".to_owned();
            challenge.headers.push(("www-authenticate".to_owned(), value));
            challenge.when = When::Always;
            challenge
        }
        "adopt" => Dialect { adopt: true, ..text(404, "") },
        _ => return None,
    })
}

fn dialect(status: u16, content_type: &str, body: String) -> Dialect {
    let headers = vec![("content-type".to_owned(), content_type.to_owned())];
    Dialect { when: When::Unknown, adopt: false, status, headers, body }
}

#[cfg(test)]
mod tests {
    use super::Dialect;
    use http_body_util::BodyExt as _;
    use serde_json::json;

    #[tokio::test]
    async fn ac02_the_requests_id_takes_its_place_in_the_body() {
        let dialect = Dialect::read(&json!({"preset": "200-32600"})).expect("a preset");
        let response = dialect.response(&json!("x"));
        assert_eq!(response.status(), 200);
        let body = response.into_body().collect().await.expect("whole").to_bytes();
        assert!(body.starts_with(br#"{"jsonrpc":"2.0","id":"x","error":{"code":-32600"#));
    }

    #[test]
    fn an_unknown_preset_is_refused() {
        assert!(Dialect::read(&json!({"preset": "418"})).is_err());
        assert!(Dialect::read(&json!({"body": "no status"})).is_err());
    }
}
