//! Server-sent events, read as they come.

/// One event that carried at least one field.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SseEvent {
    /// `id:`, if the event had one.
    pub id: Option<String>,
    /// `event:`, if the event had one.
    pub event: Option<String>,
    /// `retry:`, if the event had one.
    pub retry_ms: Option<u64>,
    /// The lines of `data:`, joined. A priming event has none or an empty one.
    pub data: String,
}

/// What a stream is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SseItem {
    /// An event.
    Event(SseEvent),
    /// A comment line, as is sent to keep a connection alive.
    Comment(String),
}

/// A parser that takes bytes in pieces of any size.
#[derive(Debug, Default)]
pub struct SseParser {
    buffer: Vec<u8>,
    read: usize,
    event: SseEvent,
    begun: bool,
}

impl SseParser {
    /// Takes more bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.read > 0 {
            self.buffer.drain(..self.read);
            self.read = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole item of what was pushed. An event that has not ended is never one.
    pub fn next_item(&mut self) -> Option<SseItem> {
        while let Some(length) = self.buffer[self.read..].iter().position(|byte| *byte == b'\n') {
            let line = String::from_utf8_lossy(&self.buffer[self.read..self.read + length]).into_owned();
            self.read += length + 1;
            if let Some(item) = self.take(line.strip_suffix('\r').unwrap_or(&line)) {
                return Some(item);
            }
        }
        None
    }

    fn take(&mut self, line: &str) -> Option<SseItem> {
        if line.is_empty() {
            let event = std::mem::take(&mut self.event);
            return std::mem::take(&mut self.begun).then_some(SseItem::Event(event));
        }
        if let Some(comment) = line.strip_prefix(':') {
            return Some(SseItem::Comment(comment.trim_start().to_owned()));
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "id" => self.event.id = Some(value.to_owned()),
            "event" => self.event.event = Some(value.to_owned()),
            "retry" => self.event.retry_ms = value.parse().ok(),
            "data" => {
                if !self.event.data.is_empty() {
                    self.event.data.push('\n');
                }
                self.event.data.push_str(value);
            }
            _ => return None,
        }
        self.begun = true;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::{SseItem, SseParser};

    #[test]
    fn pieces_of_any_size_give_the_same_items() {
        let text =
            ": hello\r\n\r\nid: 1-0\nretry: 4000\ndata: \n\nevent: message\ndata: {\"a\":\ndata: 1}\n\ndata: cut of";
        let mut seen = Vec::new();
        for size in 1..=text.len() {
            let mut parser = SseParser::default();
            let mut items = Vec::new();
            for piece in text.as_bytes().chunks(size) {
                parser.push(piece);
                items.extend(std::iter::from_fn(|| parser.next_item()));
            }
            seen.push(items);
        }
        let first = &seen[0];
        assert!(seen.iter().all(|items| items == first));
        assert_eq!(first.len(), 3);
        assert_eq!(first[0], SseItem::Comment("hello".to_owned()));
        assert!(
            matches!(&first[1], SseItem::Event(event) if event.id.as_deref() == Some("1-0") && event.retry_ms == Some(4000))
        );
        assert!(matches!(&first[2], SseItem::Event(event) if event.data == "{\"a\":\n1}"));
    }
}
