//! What a server's own `tools/list` answers said: which tools may be repeated, and whether the list has changed.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};

use aws_lc_rs::digest;
use mainstay_core::wire::envelope;

use crate::notice::ListsChanged;
use crate::wire::lock;

/// One page of a `tools/list` answer. Shared by all sessions that were told the same.
#[derive(Debug)]
pub(crate) struct Page {
    digest: [u8; 32],
    /// Tools with `readOnlyHint` or `idempotentHint`.
    safe: BTreeSet<Box<str>>,
    more: bool,
}

/// The pages that one session was told.
#[derive(Debug, Default)]
pub(crate) struct Catalogue(Vec<Arc<Page>>);

impl Catalogue {
    /// Takes a page in. The first one replaces what was known.
    pub(crate) fn observe(&mut self, page: Arc<Page>, first: bool) {
        if first {
            self.0.clear();
        }
        if self.0.len() < PAGES_MAX && !self.0.iter().any(|known| Arc::ptr_eq(known, &page)) {
            self.0.push(page);
            self.0.shrink_to_fit();
        }
    }

    /// Whether the server says that calling `tool` twice is no harm (U5).
    pub(crate) fn says_safe(&self, tool: &str) -> bool {
        self.0.iter().any(|page| page.safe.contains(tool))
    }

    /// Whether anything is known that a new list could be compared with.
    pub(crate) fn is_known(&self) -> bool {
        !self.0.is_empty()
    }

    /// How a new first page compares.
    pub(crate) fn compare(&self, page: &Page) -> ListsChanged {
        match self.0.first() {
            None => ListsChanged::Unknown,
            Some(known) if known.digest != page.digest => ListsChanged::Changed,
            Some(known) if known.more => ListsChanged::Unknown,
            Some(_) => ListsChanged::Same,
        }
    }
}

/// Pages lately seen, so that equal ones are read and kept once.
#[derive(Debug, Default)]
pub(crate) struct Pages(Mutex<VecDeque<Arc<Page>>>);

impl Pages {
    /// The page that the raw `result` of a `tools/list` answer is.
    pub(crate) fn page(&self, result: &[u8]) -> Arc<Page> {
        let mut digest = [0; 32];
        digest.copy_from_slice(digest::digest(&digest::SHA256, result).as_ref());
        let mut pages = lock(&self.0);
        if let Some(page) = pages.iter().find(|page| page.digest == digest) {
            return Arc::clone(page);
        }
        let page = Arc::new(read(result, digest));
        pages.push_back(Arc::clone(&page));
        if pages.len() > PAGES_SHARED_MAX {
            pages.pop_front();
        }
        page
    }
}

/// Whether the `tools/list` request `message` asks for the first page.
pub(crate) fn asks_first_page(message: &[u8]) -> bool {
    let params = envelope::scan(message).ok().and_then(|envelope| envelope.params);
    params.is_none_or(|params| envelope::member(message, &params, "cursor").is_none())
}

fn read(result: &[u8], digest: [u8; 32]) -> Page {
    let whole = 0..result.len();
    let more = envelope::member(result, &whole, "nextCursor").is_some_and(|span| !envelope::is_null(&result[span]));
    let tools = envelope::member(result, &whole, "tools").and_then(|span| result.get(span)).unwrap_or_default();
    let spans = envelope::batch(tools).ok().flatten().unwrap_or_default();
    let mut safe = BTreeSet::new();
    for tool in spans.into_iter().filter_map(|span| tools.get(span)) {
        if is_safe(tool)
            && let Some(name) = crate::wire::text_member(tool, "name")
        {
            safe.insert(name.into_boxed_str());
        }
    }
    Page { digest, safe, more }
}

fn is_safe(tool: &[u8]) -> bool {
    let annotations = envelope::member(tool, &(0..tool.len()), "annotations");
    annotations.is_some_and(|annotations| {
        let says = |hint| envelope::member(tool, &annotations, hint).is_some_and(|span| tool[span] == *b"true");
        says("readOnlyHint") || says("idempotentHint")
    })
}

/// Pages of one list that are remembered; tools on later ones are not known to be safe.
const PAGES_MAX: usize = 64;

/// Pages that are shared between sessions of all servers.
const PAGES_SHARED_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn u5_only_tools_that_say_so_are_safe() {
        let result = br#"{"tools":[{"name":"read","annotations":{"readOnlyHint":true}},{"name":"put","annotations":{"title":"x","idempotentHint" : true}},
            {"name":"incr"},{"name":"rm","annotations":{"readOnlyHint":false,"destructiveHint":true}},{"annotations":{"readOnlyHint":true}}]}"#;
        let pages = Pages::default();
        let mut catalogue = Catalogue::default();
        catalogue.observe(pages.page(result), true);
        for (tool, safe) in [("read", true), ("put", true), ("incr", false), ("rm", false), ("other", false)] {
            assert_eq!(catalogue.says_safe(tool), safe, "{tool}");
        }
        catalogue.observe(pages.page(br#"{"tools":[]}"#), true);
        assert!(!catalogue.says_safe("read"));
    }

    #[test]
    fn u6_a_changed_list_is_told_from_the_same() {
        let pages = Pages::default();
        let (one, two) = (pages.page(br#"{"tools":[{"name":"a"}]}"#), pages.page(br#"{"tools":[{"name":"b"}]}"#));
        let partial = pages.page(br#"{"tools":[{"name":"a"}],"nextCursor":"2"}"#);
        let mut catalogue = Catalogue::default();
        assert_eq!(catalogue.compare(&one), ListsChanged::Unknown);
        catalogue.observe(Arc::clone(&one), true);
        assert!(Arc::ptr_eq(&one, &pages.page(br#"{"tools":[{"name":"a"}]}"#)));
        assert_eq!((catalogue.compare(&one), catalogue.compare(&two)), (ListsChanged::Same, ListsChanged::Changed));
        catalogue.observe(Arc::clone(&partial), true);
        assert_eq!(catalogue.compare(&partial), ListsChanged::Unknown);
    }

    #[test]
    fn the_first_page_is_asked_for_without_cursor() {
        assert!(asks_first_page(br#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#));
        assert!(asks_first_page(br#"{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{}}"#));
        assert!(!asks_first_page(br#"{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"cursor":"2"}}"#));
    }
}
