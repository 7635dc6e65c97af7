//! The timeline that Perfetto and Chrome's tracer open: a track for each rank, a slice for each span of its stream.
//!
//! After the data path, on the main thread.

use serde::Serialize;

use crate::cli::ranks::sample::RankResult;

/// One event of the trace format; times are in µs.
#[derive(Serialize)]
struct Event<'a> {
    name: &'a str,
    ph: &'static str,
    pid: usize,
    tid: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    args: serde_json::Value,
}

/// The runs of a sweep: a process of the timeline each, its ranks as threads.
///
/// # Errors
/// The writer's error; none for these types.
pub fn trace(runs: &[(String, Vec<RankResult>)]) -> serde_json::Result<String> {
    let mut events = Vec::new();
    for (pid, (name, ranks)) in runs.iter().enumerate() {
        events.push(label("process_name", pid, 0, name.clone()));
        for rank in ranks {
            events.push(label("thread_name", pid, rank.rank, format!("rank {}", rank.rank)));
            events.extend(rank.spans.iter().map(|span| Event {
                name: &span.name,
                ph: "X",
                pid,
                tid: rank.rank,
                ts: Some(span.start_us),
                dur: Some(span.length_us),
                args: serde_json::json!({ "iteration": span.iteration }),
            }));
        }
    }
    serde_json::to_string(&serde_json::json!({ "traceEvents": events, "displayTimeUnit": "ns" }))
}

fn label(name: &'static str, pid: usize, tid: usize, text: String) -> Event<'static> {
    Event { name, ph: "M", pid, tid, ts: None, dur: None, args: serde_json::json!({ "name": text }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::ranks::sample::Span;

    #[test]
    fn every_span_becomes_a_complete_slice_on_its_rank() {
        let span = Span { name: "dispatch".into(), iteration: 4, start_us: 1.5, length_us: 2.0 };
        let rank = RankResult { rank: 3, spans: vec![span], ..RankResult::default() };
        let text = trace(&[("128 tokens".into(), vec![rank])]).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        let slice = &value["traceEvents"][2];
        assert_eq!((slice["ph"].as_str(), slice["tid"].as_u64()), (Some("X"), Some(3)));
        assert_eq!((slice["ts"].as_f64(), slice["dur"].as_f64()), (Some(1.5), Some(2.0)));
        assert_eq!(value["traceEvents"][1]["args"]["name"], "rank 3");
    }

    #[test]
    fn the_timeline_names_runs_and_ranks_and_has_every_span_once() {
        let span =
            |name: &str, iteration, start_us, length_us| Span { name: name.into(), iteration, start_us, length_us };
        let rank = |rank, spans| RankResult { rank, spans, ..RankResult::default() };
        let runs = [
            (
                "8 tokens".to_string(),
                vec![rank(0, vec![span("dispatch", 1, 2.0, 3.0), span("combine", 4, 5.0, 6.0)]), rank(1, Vec::new())],
            ),
            ("9 tokens".to_string(), vec![rank(5, vec![span("experts", 7, 8.0, 9.0)])]),
        ];
        let label = |name, pid, tid, text| serde_json::json!({"name": name, "ph": "M", "pid": pid, "tid": tid, "args": {"name": text}});
        let slice = |name, [pid, tid, iteration]: [u32; 3], ts: f64, dur: f64| {
            let args = serde_json::json!({"iteration": iteration});
            serde_json::json!({"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args})
        };
        let events = [
            label("process_name", 0, 0, "8 tokens"),
            label("thread_name", 0, 0, "rank 0"),
            slice("dispatch", [0, 0, 1], 2.0, 3.0),
            slice("combine", [0, 0, 4], 5.0, 6.0),
            label("thread_name", 0, 1, "rank 1"),
            label("process_name", 1, 0, "9 tokens"),
            label("thread_name", 1, 5, "rank 5"),
            slice("experts", [1, 5, 7], 8.0, 9.0),
        ];
        let found: serde_json::Value = serde_json::from_str(&trace(&runs).unwrap()).unwrap();
        assert_eq!(found, serde_json::json!({"traceEvents": events, "displayTimeUnit": "ns"}));
    }
}
