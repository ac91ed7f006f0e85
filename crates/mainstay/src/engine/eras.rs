//! Which era of the protocol each server speaks: asked through here, and remembered over restarts (E5).

use std::sync::Arc;

use bytes::Bytes;
use mainstay_core::resume::ServerCard;
use mainstay_core::wire::modern::{Era, Spoken};
use mainstay_store::Write;
use mainstay_upstream::Server;

use crate::engine::{Engine, Served};

impl Engine {
    /// The newest era that the server of `served` speaks, found out if need be. `None` if it gives no evidence now. Takes at
    /// most [`PROBE_BOUND`](mainstay_upstream::PROBE_BOUND); only for who can't be served without.
    pub async fn era_of(&self, served: &Served) -> Option<Era> {
        let era = self.upstreams.era(&served.server).await;
        self.note_spoken(&served.server).await;
        era
    }

    /// What is known of the eras of `server`, without asking it. A program is taken for a legacy one until it shows otherwise.
    pub fn spoken_by(&self, server: &Arc<Server>) -> Spoken {
        let spoken = self.upstreams.spoken(server);
        let is_legacy = !server.is_http() && spoken.modern != Some(true);
        Spoken { legacy: spoken.legacy.or(is_legacy.then_some(true)), ..spoken }
    }

    /// Takes over what earlier workers have found out: a server that is known is not asked again.
    pub(crate) async fn recall_eras(&self) {
        for server in self.servers.values().map(|served| &served.server) {
            if !is_found_out(server) {
                continue;
            }
            if let Some(card) = self.store.card(&server.name, server.fingerprint()).await {
                self.upstreams.recall(server, card.spoken, self.now().since(card.saved_at));
                self.facts.eras.insert(server.name.clone(), card.spoken);
            }
        }
    }

    /// Remembers which eras a server was found to speak, if that is news.
    async fn note_spoken(&self, server: &Arc<Server>) {
        let spoken = self.upstreams.spoken(server);
        let is_news = self.facts.eras.get(&server.name).is_none_or(|known| *known != spoken);
        if !is_found_out(server) || spoken == Spoken::default() || !is_news || self.has_left() {
            return;
        }
        let said = self.facts.cards.get(&server.name).map(|said| said.clone());
        let said = match said {
            Some(said) => said,
            None => {
                let card = self.store.card(&server.name, server.fingerprint()).await;
                card.map_or_else(Bytes::new, |card| card.initialize_result)
            }
        };
        self.write_card(server, said);
    }

    /// Writes down what is known of `server`, which said `initialize_result` of itself. A hint.
    pub(crate) fn write_card(&self, server: &Arc<Server>, initialize_result: Bytes) {
        let spoken = self.upstreams.spoken(server);
        self.facts.eras.insert(server.name.clone(), spoken);
        self.store.hint(Write::Card(ServerCard {
            server: server.name.clone(),
            fingerprint: server.fingerprint(),
            initialize_result,
            spoken,
            saved_at: self.now(),
        }));
    }
}

/// Whether the eras of `server` are not known from its configuration.
fn is_found_out(server: &Server) -> bool {
    server.fixed_era().is_none()
}
