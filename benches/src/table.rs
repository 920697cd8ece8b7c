//! Rounds in, a line of the table out.

use std::io::Write as _;

/// What a row must reach. `ours` and `raw` are those of one round.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Target {
    /// A rate: ours is at least so many times the raw one.
    TimesAtLeast(f64),
    /// A time: ours is at most so many times the raw one.
    TimesAtMost(f64),
    /// A time: so many times the raw one, and so many milliseconds.
    TimesAndMillisAtMost(f64, f64),
    /// A size: there is no raw one.
    AtMost(f64),
}

/// One row's measurements.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) what: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) target: Target,
    pub(crate) raw: Vec<f64>,
    pub(crate) ours: Vec<f64>,
    /// What else was seen, for whoever looks for the reason.
    pub(crate) notes: Vec<String>,
}

impl Row {
    pub(crate) fn new(what: &'static str, unit: &'static str, target: Target) -> Self {
        Self { what, unit, target, raw: Vec::new(), ours: Vec::new(), notes: Vec::new() }
    }

    /// Adds a paired round.
    pub(crate) fn round(&mut self, raw: f64, ours: f64) {
        say(&format!("  {}: raw {}, ours {} {}", self.what, short(raw), short(ours), self.unit));
        self.raw.push(raw);
        self.ours.push(ours);
    }

    /// Adds a round that has nothing to be compared with.
    pub(crate) fn alone(&mut self, ours: f64) {
        say(&format!("  {}: {} {}", self.what, short(ours), self.unit));
        self.ours.push(ours);
    }

    fn ratios(&self) -> Vec<f64> {
        self.raw.iter().zip(&self.ours).map(|(raw, ours)| ours / raw).collect()
    }

    fn target(&self) -> String {
        match self.target {
            Target::TimesAtLeast(times) => format!("≥ {times}×"),
            Target::TimesAtMost(times) => format!("≤ {times}×"),
            Target::TimesAndMillisAtMost(times, millis) => format!("≤ {times}× + {millis} ms"),
            Target::AtMost(most) => format!("≤ {most} {}", self.unit),
        }
    }

    fn is_met(&self) -> bool {
        match self.target {
            Target::TimesAtLeast(times) => median(&self.ratios()) >= times,
            Target::TimesAtMost(times) => median(&self.ratios()) <= times,
            Target::TimesAndMillisAtMost(times, millis) => {
                let over: Vec<f64> = self.raw.iter().zip(&self.ours).map(|(raw, ours)| ours - times * raw).collect();
                median(&over) <= millis
            }
            Target::AtMost(most) => median(&self.ours) <= most,
        }
    }

    fn line(&self) -> String {
        let (raw, ratio) = if self.raw.is_empty() {
            ("–".to_owned(), "–".to_owned())
        } else {
            (format!("{} {}", spread(&self.raw), self.unit), format!("{}×", spread(&self.ratios())))
        };
        let met = if self.is_met() { "met" } else { "**missed**" };
        format!(
            "| {} | {raw} | {} {} | {ratio} | {} | {met} |",
            self.what,
            spread(&self.ours),
            self.unit,
            self.target()
        )
    }
}

/// The middle one, or the middle of the two.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => values[odd / 2],
        even => f64::midpoint(values[even / 2 - 1], values[even / 2]),
    }
}

/// The value that so many of a hundred do not exceed.
pub(crate) fn percentile(values: &[f64], hundredths: usize) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let at = (values.len() * hundredths).div_ceil(100).saturating_sub(1);
    values.get(at).copied().unwrap_or(f64::NAN)
}

fn spread(values: &[f64]) -> String {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if values.len() < 2 {
        return short(median(values));
    }
    format!("{} ({}…{})", short(median(values)), short(least), short(most))
}

/// Three digits are more than a shared machine deserves.
fn short(value: f64) -> String {
    match value.abs() {
        1_000_000.0.. => format!("{:.2} M", value / 1e6),
        10_000.0.. => format!("{:.0} k", value / 1e3),
        1_000.0.. => format!("{:.1} k", value / 1e3),
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Progress, beside the table.
pub(crate) fn say(text: &str) {
    // Whoever closed it does not want to know.
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// The table, on standard output.
pub(crate) fn print(rows: &[Row]) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "| what | raw | ours | ratio | target | |")?;
    writeln!(out, "|---|---|---|---|---|---|")?;
    for row in rows {
        writeln!(out, "{}", row.line())?;
    }
    for (row, note) in rows.iter().flat_map(|row| row.notes.iter().map(move |note| (row, note))) {
        writeln!(out, "- {}: {note}", row.what)?;
    }
    out.flush()
}
