//! `events`: what happened to agents and runs.

use crate::{
    app::App,
    failure::{Failure, USAGE},
    output::{self, Format, Out},
    parse, resolve,
    verbs::{flushed, show},
};
use acri::event::TYPE_NAMES;
use acri_client::{EventItem, EventSelection, EventTypes, EventsSince, StoredEvent};
use anyhow::Result;
use serde_json::json;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  acri events -f                                  everywhere, as it happens
  acri events 3fa8 --filter all                   everything about one agent
  acri events --filter run.failed,run.killed --since 1h -o json

Without --filter only the eleven types of the spec are shown. In JSON each
event bears its `stream_sequence`: `--since SEQUENCE` goes on after it.
")]
pub(crate) struct Args {
    /// Only of this AGENT, RUN or AGENT/RUN; unique prefixes and names will do
    #[arg(value_name = "RUN")]
    run: Option<String>,
    /// Only of the newest run
    #[arg(long, short = 'L', conflicts_with = "run")]
    last: bool,
    /// Go on with what will happen, until Ctrl-C
    #[arg(long, short = 'f')]
    follow: bool,
    /// Only these types: names, families such as `run.*`, or `all`
    #[arg(long, value_name = "TYPE,TYPE", value_delimiter = ',')]
    filter: Vec<String>,
    /// Where to begin: start, now, after a stream sequence, at a time (RFC
    /// 3339) or a time ago such as 10m
    #[arg(long, value_name = "WHERE", default_value = "start", value_parser = parse::events_since)]
    since: EventsSince,
}

pub(crate) async fn perform(app: &mut App, args: Args) -> Result<()> {
    let types = types(&args.filter)?;
    // A later version's type is named rightly and may come; a slip never does.
    for unknown in unknown(&types) {
        app.out.warn(format_args!("acri: {unknown:?} is no event type that this version knows"))?;
    }
    let client = app.client().await?;
    let selection = if args.run.is_none() && !args.last {
        EventSelection::All
    } else {
        let target = resolve::target(&client, args.run.as_deref()).await?;
        match target.run {
            Some(run) => EventSelection::Run(target.agent, run),
            None => EventSelection::Agent(target.agent),
        }
    };
    let mut events = client.events(selection, types, args.since, args.follow);
    while let Some(item) = flushed(&mut events, &mut app.out).await? {
        print(&mut app.out, item?)?;
    }
    Ok(())
}

fn types(filter: &[String]) -> Result<EventTypes> {
    if filter.is_empty() {
        return Ok(EventTypes::Spec);
    }
    if filter.iter().any(|name| name == "all" || name == "*") {
        return Ok(EventTypes::All);
    }
    if let Some(odd) = filter.iter().find(|name| name.split('.').count() != 2) {
        let names = TYPE_NAMES.join(", ");
        return Err(Failure::new(USAGE, format!("{odd:?} is no event type; there are {names}")).into());
    }
    Ok(EventTypes::Only(filter.iter().cloned().collect()))
}

fn unknown(types: &EventTypes) -> Vec<&str> {
    let EventTypes::Only(names) = types else { return Vec::new() };
    let is_known = |name: &&String| {
        let named = EventTypes::Only([String::clone(name)].into());
        TYPE_NAMES.iter().any(|known| named.matches(known))
    };
    names.iter().filter(|name| !is_known(name)).map(String::as_str).collect()
}

fn print(out: &mut Out, item: EventItem) -> Result<()> {
    match item {
        EventItem::Event(event) if out.format == Format::Table => out.line(line(&event)),
        EventItem::Event(event) => out.item(&object(&event)?),
        EventItem::Rewound => out.warn("acri: the event stream was replaced or put back; what follows may repeat"),
        EventItem::Unreadable { seq, detail } => {
            out.warn(format_args!("acri: event at {seq} cannot be read: {detail}"))
        }
    }
}

/// One line a person can read.
pub(crate) fn line(event: &StoredEvent) -> String {
    let envelope = &event.envelope;
    let place = match envelope.run {
        Some(run) => format!("{}/{}", output::short(envelope.agent), output::short(run)),
        None => output::short(envelope.agent),
    };
    let detail = output::plain(&show::event(envelope));
    format!("{}  {:<18} {place:<17}  {detail}", envelope.time, envelope.event.type_name()).trim_end().to_owned()
}

/// The envelope, with its place in the stream.
pub(crate) fn object(event: &StoredEvent) -> Result<serde_json::Value> {
    let mut value = output::json(&event.envelope)?;
    value["stream_sequence"] = json!(event.seq.0);
    value["stored"] = event.time.to_string().into();
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_names_types_or_families_and_a_slip_is_refused() {
        let named = |text: &str| types(&text.split(',').map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(types(&[]).unwrap(), EventTypes::Spec);
        assert_eq!(named("all").unwrap(), EventTypes::All);
        assert!(named("run.*,agent.created").unwrap().matches("run.started"));
        assert!(named("started").is_err());
        let slips = named("run.*,run.faild,agent.created,later.*").unwrap();
        assert_eq!(unknown(&slips), ["later.*", "run.faild"]);
    }
}
