//! Leases over a key-value bucket, written as the messages that they are: a
//! `put` of the key-value API has no TTL, and its `update` would make a lease
//! eternal.

use super::{
    NatsBus,
    config::NODES,
    events::{appended, last_under},
    link::ApiMiss,
    wire::{Got, Info, NO_MESSAGE, Stored},
};
use crate::port::{Appended, Fault, LeaseEntry, Leased, Leases, Why};
use acri::{Incarnation, NodeId, StreamSeq, Timestamp};
use async_nats::{HeaderMap, header};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use serde_json::json;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const RENEW: &str = "write a lease";
const FENCE: &str = "fence a lease";
const READ: &str = "read a lease";
const COLLECT: &str = "collect a tombstone";
const CLOCK: &str = "compare clocks";
const PREFIX: &str = "$KV.ACRI_NODES.";
const TTL: &str = "Nats-TTL";
const MARKER: &str = "Nats-Marker-Reason";
const MARKER_EXPIRED: &str = "MaxAge";
/// Set by key-value clients that delete or purge.
const KV_OPERATION: &str = "KV-Operation";
/// What an entry is, where it is no live lease.
const STATE: &str = "Acri-Lease";
const FENCED: &str = "fenced";
/// Entries that are read at a time.
const READS_MAX: usize = 16;

fn subject(incarnation: Incarnation) -> String {
    format!("{PREFIX}{incarnation}")
}

fn entry(stored: Option<Stored>) -> Result<LeaseEntry, Fault> {
    let Some(stored) = stored else { return Ok(LeaseEntry::Absent) };
    let headers = stored.headers(READ)?;
    match headers.get(MARKER) {
        Some(MARKER_EXPIRED) => return Ok(LeaseEntry::Expired(stored.seq())),
        // Deleted by hand: that is no expiry, and nobody may renew over it.
        Some(_) => return Ok(LeaseEntry::Fenced(stored.seq())),
        None => {}
    }
    if headers.get(STATE) == Some(FENCED) || headers.get(KV_OPERATION).is_some() {
        return Ok(LeaseEntry::Fenced(stored.seq()));
    }
    let body = stored.body(READ)?;
    let node = std::str::from_utf8(&body).ok().and_then(|text| text.parse().ok());
    let node: NodeId = node.ok_or_else(|| super::wire::malformed(READ, stored.seq, "its node"))?;
    Ok(LeaseEntry::Live { node, revision: stored.seq(), renewed: stored.time(READ)? })
}

impl NatsBus {
    async fn put(
        &self,
        operation: &'static str,
        key: Incarnation,
        expect: StreamSeq,
        headers: HeaderMap,
        body: Bytes,
    ) -> Leased {
        let mut headers = headers;
        headers.insert(header::NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, expect.to_string());
        match appended(operation, self.link.publish(operation, &subject(key), headers, body).await) {
            Appended::Stored(seq) => Leased::Written(seq),
            Appended::Conflict => Leased::Lost,
            Appended::InFlight => {
                let detail = "another write is in flight".to_owned();
                Leased::Unknown(Fault::Unavailable { operation, detail })
            }
            Appended::Duplicate(seq) => {
                let detail = format!("a duplicate at sequence {seq}, without an id");
                Leased::Unknown(Fault::Malformed { operation, detail })
            }
            Appended::Unknown(fault) | Appended::Refused(fault) => Leased::Unknown(fault),
        }
    }
}

fn now_micros() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

#[async_trait]
impl Leases for NatsBus {
    async fn write_lease(&self, incarnation: Incarnation, node: &NodeId, expect: StreamSeq, ttl: Duration) -> Leased {
        let mut headers = HeaderMap::new();
        // Whole seconds, at least one; a lease rather lasts longer than it was asked for.
        let seconds = ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0);
        headers.insert(TTL, format!("{}s", seconds.max(1)));
        self.put(RENEW, incarnation, expect, headers, Bytes::from(node.to_string())).await
    }

    async fn fence(&self, incarnation: Incarnation, expect: StreamSeq) -> Leased {
        let mut headers = HeaderMap::new();
        headers.insert(STATE, FENCED);
        self.put(FENCE, incarnation, expect, headers, Bytes::from_static(FENCED.as_bytes())).await
    }

    async fn lease(&self, incarnation: Incarnation) -> Result<LeaseEntry, Fault> {
        entry(last_under(&self.link, READ, NODES, &subject(incarnation)).await?)
    }

    async fn leases(&self) -> Result<Vec<(Incarnation, LeaseEntry)>, Fault> {
        let mut keys = Vec::new();
        let mut offset = 0_u64;
        loop {
            let request = json!({ "subjects_filter": format!("{PREFIX}>"), "offset": offset });
            let info: Info = self
                .link
                .api(READ, &format!("STREAM.INFO.{NODES}"), &request)
                .await
                .map_err(|miss| miss.into_fault(READ))?;
            let page = u64::try_from(info.state.subjects.len()).unwrap_or(u64::MAX);
            // A key of another shape is not a lease.
            keys.extend(
                info.state.subjects.keys().filter_map(|key| key.strip_prefix(PREFIX)?.parse::<Incarnation>().ok()),
            );
            offset = offset.saturating_add(page);
            if page == 0 || offset >= info.total {
                break;
            }
        }
        let entries = stream::iter(keys)
            .map(|key| async move { Ok::<_, Fault>((key, self.lease(key).await?)) })
            .buffered(READS_MAX)
            .try_collect::<Vec<_>>()
            .await?;
        // Gone between the list and the read.
        Ok(entries.into_iter().filter(|(_, entry)| *entry != LeaseEntry::Absent).collect())
    }

    async fn collect_tombstone(&self, incarnation: Incarnation, revision: StreamSeq) -> Result<(), Fault> {
        let refused = |detail: String| Fault::Refused { operation: COLLECT, why: Why::State, detail };
        let method = format!("STREAM.MSG.GET.{NODES}");
        let stored = match self.link.api::<Got>(COLLECT, &method, &json!({ "seq": revision.0 })).await {
            Ok(got) => got.message,
            Err(ApiMiss::Api(error)) if error.err_code == NO_MESSAGE => return Ok(()),
            Err(miss) => return Err(miss.into_fault(COLLECT)),
        };
        if stored.subject != subject(incarnation) || entry(Some(stored))? != LeaseEntry::Fenced(revision) {
            return Err(refused(format!("revision {revision} is no tombstone of {incarnation}")));
        }
        // A delete by sequence leaves no marker, over which the fenced could write again.
        let method = format!("STREAM.MSG.DELETE.{NODES}");
        let request = json!({ "seq": revision.0, "no_erase": true });
        let answer: Result<serde_json::Value, _> = self.link.api(COLLECT, &method, &request).await;
        answer.map(drop).map_err(|miss| miss.into_fault(COLLECT))
    }

    async fn clock_offset_micros(&self) -> Result<i64, Fault> {
        let before = now_micros();
        let info: Info = self
            .link
            .api(CLOCK, &format!("STREAM.INFO.{NODES}"), &serde_json::Value::Null)
            .await
            .map_err(|miss| miss.into_fault(CLOCK))?;
        let after = now_micros();
        let told: Option<Timestamp> = info.ts.and_then(|text| text.parse().ok());
        let told =
            told.ok_or_else(|| Fault::Malformed { operation: CLOCK, detail: "no time in the answer".to_owned() })?;
        // The answer was made somewhere between the two; half way is the best guess.
        Ok(told.as_micros() - (before + (after - before) / 2))
    }
}
