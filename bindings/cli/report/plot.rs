//! A plot of latency and of bandwidth against tokens, with the floor that the links set, as SVG written by hand.
//!
//! After the data path, on the main thread. All axes are logarithmic; runs of zero tokens have no place on them and are
//! left out. Without traffic between ranks there is no bandwidth panel.

use std::fmt::Write;

use super::result::RunResult;

const WIDTH: f64 = 760.0;
/// Of one panel.
const HEIGHT: f64 = 460.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 170.0;
const TOP: f64 = 46.0;
const BOTTOM: f64 = 56.0;
const DISPATCH: &str = "#1f6fb2";
const COMBINE: &str = "#c2571a";

/// One of the plot's panels, which stand below one another.
struct Panel {
    title: String,
    unit: &'static str,
    curves: Vec<Curve>,
}

/// One curve: a name, a colour, dashes, and (tokens, value) of each run.
struct Curve {
    name: &'static str,
    colour: &'static str,
    dashes: &'static str,
    points: Vec<(f64, f64)>,
}

/// Where a panel's lines and points go.
#[derive(Debug, Clone, Copy)]
struct Frame {
    x: Axis,
    y: Axis,
}

/// A logarithmic axis between two values, drawn between two places.
#[derive(Debug, Clone, Copy)]
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    /// Bounds values by whole powers of `base`.
    fn around(values: impl Iterator<Item = f64>, base: f64, from: f64, to: f64) -> Axis {
        let (low, high) = values.fold((f64::INFINITY, 0.0f64), |(low, high), v| (low.min(v), high.max(v)));
        if !low.is_finite() || low <= 0.0 {
            return Axis { low: 1.0, high: base, from, to };
        }
        let power = |exponent: f64| base.powf(exponent);
        let below = (low.log(base) + 1e-9).floor();
        let above = (high.log(base) - 1e-9).ceil().max(below + 1.0);
        Axis { low: power(below), high: power(above), from, to }
    }

    fn place(&self, value: f64) -> f64 {
        let share = (value / self.low).ln() / (self.high / self.low).ln();
        self.from + share * (self.to - self.from)
    }

    fn contains(&self, value: f64) -> bool {
        value >= self.low * 0.999 && value <= self.high * 1.001
    }
}

/// The plot of a sweep.
pub fn plot(results: &[RunResult]) -> String {
    let mut panels = vec![latency(results)];
    panels.extend(Some(bandwidth(results)).filter(|panel| panel.points().next().is_some()));
    let height = HEIGHT * panels.len() as f64;
    let mut svg = String::new();
    let _ = write!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    for (place, panel) in panels.iter().enumerate() {
        panel.draw(&mut svg, HEIGHT * place as f64, results);
    }
    svg.push_str("</svg>\n");
    svg
}

fn latency(results: &[RunResult]) -> Panel {
    let curve = |name, colour, dashes, us| curve(results, name, colour, dashes, us);
    Panel {
        title: title(results),
        unit: "us",
        curves: vec![
            curve("combine p99", COMBINE, "2 3", |r| r.combine_us.p99),
            curve("combine p50", COMBINE, "", |r| r.combine_us.p50),
            curve("combine floor", COMBINE, "8 4", |r| r.floor_us.combine),
            curve("dispatch p99", DISPATCH, "2 3", |r| r.dispatch_us.p99),
            curve("dispatch p50", DISPATCH, "", |r| r.dispatch_us.p50),
            curve("dispatch floor", DISPATCH, "8 4", |r| r.floor_us.dispatch),
        ],
    }
}

/// The floor of a time is the ceiling of a bandwidth.
fn bandwidth(results: &[RunResult]) -> Panel {
    let curve = |name, colour, dashes, gbps| curve(results, name, colour, dashes, gbps);
    Panel {
        title: "sent by each rank, within its node and to others".to_string(),
        unit: "GB/s",
        curves: vec![
            curve("dispatch at floor", DISPATCH, "8 4", |r| gbps(dispatched(r), r.floor_us.dispatch)),
            curve("dispatch at p50", DISPATCH, "", |r| gbps(dispatched(r), r.dispatch_us.p50)),
            curve("combine at floor", COMBINE, "8 4", |r| gbps(combined(r), r.floor_us.combine)),
            curve("combine at p50", COMBINE, "", |r| gbps(combined(r), r.combine_us.p50)),
        ],
    }
}

fn dispatched(r: &RunResult) -> u64 {
    r.bytes_per_rank.dispatch_nvlink + r.bytes_per_rank.dispatch_wire
}

fn combined(r: &RunResult) -> u64 {
    r.bytes_per_rank.combine_nvlink + r.bytes_per_rank.combine_wire
}

/// GB/s of so many bytes in so many µs; 0 where no time is known.
fn gbps(bytes: u64, us: f64) -> f64 {
    if us > 0.0 { bytes as f64 / us / 1000.0 } else { 0.0 }
}

fn title(results: &[RunResult]) -> String {
    results.first().map_or("no results".to_string(), |r| {
        format!("{}: {}, {} out, {} back, {}, {}", r.preset, r.machine(), r.dtype, r.combine_dtype, r.layout, r.mode)
    })
}

/// A curve of the runs that have both a count of tokens and a value.
fn curve(
    results: &[RunResult],
    name: &'static str,
    colour: &'static str,
    dashes: &'static str,
    value: fn(&RunResult) -> f64,
) -> Curve {
    let points = results.iter().map(|r| (r.tokens as f64, value(r)));
    let mut points: Vec<(f64, f64)> = points.filter(|(tokens, value)| *tokens > 0.0 && *value > 0.0).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    Curve { name, colour, dashes, points }
}

impl Panel {
    fn points(&self) -> impl Iterator<Item = &(f64, f64)> {
        self.curves.iter().flat_map(|curve| &curve.points)
    }

    /// Draws it with its upper edge at `top`.
    fn draw(&self, svg: &mut String, top: f64, results: &[RunResult]) {
        let frame = Frame {
            x: Axis::around(self.points().map(|p| p.0), 2.0, LEFT, WIDTH - RIGHT),
            y: Axis::around(self.points().map(|p| p.1), 10.0, top + HEIGHT - BOTTOM, top + TOP),
        };
        text(svg, LEFT, top + 24.0, "start", 14, &self.title);
        x_axis(svg, frame, results);
        y_axis(svg, frame.y, self.unit);
        for curve in &self.curves {
            draw(svg, frame, curve, self.unit);
        }
        legend(svg, frame.y.to, &self.curves);
    }
}

fn draw(svg: &mut String, Frame { x, y }: Frame, curve: &Curve, unit: &str) {
    let place = |p: &(f64, f64)| format!("{:.1},{:.1}", x.place(p.0), y.place(p.1));
    let points: Vec<String> = curve.points.iter().map(place).collect();
    let dashes =
        if curve.dashes.is_empty() { String::new() } else { format!(" stroke-dasharray=\"{}\"", curve.dashes) };
    let _ = writeln!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.8\"{dashes}/>",
        points.join(" "),
        curve.colour
    );
    let radius = if curve.dashes.is_empty() { 3.2 } else { 2.0 };
    for (tokens, value) in &curve.points {
        let (cx, cy) = (x.place(*tokens), y.place(*value));
        let _ = writeln!(
            svg,
            "<circle cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"{radius}\" fill=\"{}\">\
             <title>{}, {tokens} tokens: {} {unit}</title></circle>",
            curve.colour,
            curve.name,
            rounded(*value)
        );
    }
}

/// Ticks at the runs, with enough space between them for their labels.
fn x_axis(svg: &mut String, Frame { x, y }: Frame, results: &[RunResult]) {
    let mut ticks: Vec<usize> = results.iter().map(|r| r.tokens).filter(|t| x.contains(*t as f64)).collect();
    ticks.sort_unstable();
    ticks.dedup();
    let mut last = f64::NEG_INFINITY;
    for tick in ticks {
        let at = x.place(tick as f64);
        line(svg, (at, y.to), (at, y.from), "#eeeeee");
        if at - last > 34.0 {
            text(svg, at, y.from + 18.0, "middle", 12, &tick.to_string());
            last = at;
        }
    }
    line(svg, (x.from, y.from), (x.to, y.from), "#444444");
    text(svg, (x.from + x.to) / 2.0, y.from + 40.0, "middle", 12, "tokens per rank");
}

fn y_axis(svg: &mut String, y: Axis, unit: &str) {
    let mut decade = y.low;
    while decade < y.high * 1.001 {
        for step in [1.0, 2.0, 5.0] {
            let value = decade * step;
            if !y.contains(value) {
                continue;
            }
            let at = y.place(value);
            line(svg, (LEFT, at), (WIDTH - RIGHT, at), if step == 1.0 { "#cccccc" } else { "#eeeeee" });
            text(svg, LEFT - 8.0, at + 4.0, "end", 12, &format!("{}", rounded(value)));
        }
        decade *= 10.0;
    }
    line(svg, (LEFT, y.from), (LEFT, y.to), "#444444");
    text(svg, LEFT - 8.0, y.to - 10.0, "end", 12, unit);
}

/// Without the tail that arithmetic leaves.
fn rounded(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

fn legend(svg: &mut String, top: f64, curves: &[Curve]) {
    let left = WIDTH - RIGHT + 16.0;
    for (i, curve) in curves.iter().enumerate() {
        let at = top + 12.0 + 20.0 * i as f64;
        let dashes = if curve.dashes.is_empty() { "none" } else { curve.dashes };
        let _ = writeln!(
            svg,
            "<line x1=\"{left:.1}\" y1=\"{at:.1}\" x2=\"{:.1}\" y2=\"{at:.1}\" stroke=\"{}\" stroke-width=\"1.8\" \
             stroke-dasharray=\"{dashes}\"/>",
            left + 28.0,
            curve.colour
        );
        text(svg, left + 36.0, at + 4.0, "start", 12, curve.name);
    }
}

fn line(svg: &mut String, from: (f64, f64), to: (f64, f64), colour: &str) {
    let _ = writeln!(
        svg,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\"/>",
        from.0, from.1, to.0, to.1
    );
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, size: u32, what: &str) {
    let escaped = what.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\" fill=\"#222222\">{escaped}</text>"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::report::result::object_tests::merged;
    use crate::cli::report::result::{Bytes, Floor, Percentiles};

    #[test]
    fn axis_covers_its_values_and_is_logarithmic() {
        let axis = Axis::around([12.0, 740.0].into_iter(), 10.0, 0.0, 100.0);
        assert!((axis.low - 10.0).abs() < 1e-9 && (axis.high - 1000.0).abs() < 1e-6);
        assert!((axis.place(100.0) - 50.0).abs() < 1e-6);
        let one = Axis::around([128.0].into_iter(), 2.0, 0.0, 100.0);
        assert!(one.high > one.low && one.contains(128.0));
        assert!(Axis::around([].into_iter(), 10.0, 0.0, 1.0).place(1.0).is_finite());
    }

    /// Results of 4, 16 and 64 tokens. Times are 10 to 1000 us; every value occurs once.
    fn sweep() -> Vec<RunResult> {
        let of = |p50: f64, p99: f64| Percentiles { p50, p99, ..Percentiles::default() };
        let point = |tokens: usize, dispatch: [f64; 3], combine: [f64; 3], bytes: [u64; 4]| RunResult {
            dispatch_us: of(dispatch[1], dispatch[2]),
            combine_us: of(combine[1], combine[2]),
            floor_us: Floor { dispatch: dispatch[0], combine: combine[0] },
            bytes_per_rank: Bytes {
                dispatch_nvlink: bytes[0],
                dispatch_wire: bytes[1],
                combine_nvlink: bytes[2],
                combine_wire: bytes[3],
            },
            ..merged(tokens)
        };
        // Out of order: curves go by tokens.
        vec![
            point(64, [25.0, 80.0, 90.0], [250.0, 800.0, 1000.0], [600_000, 20_000, 3_000_000, 100_000]),
            point(4, [10.0, 20.0, 30.0], [100.0, 200.0, 300.0], [30_000, 1_000, 200_000, 7_000]),
            point(16, [15.0, 40.0, 50.0], [150.0, 400.0, 500.0], [90_000, 5_000, 700_000, 20_000]),
        ]
    }

    /// Name, colour, dashes and values of a curve, for 4, 16 and 64 tokens.
    type Drawn<'a> = (&'a str, &'a str, &'a str, [f64; 3]);

    /// The panel below `top` must have the curves at the places of their values, in this order in the legend; its
    /// vertical axis has whole decades from `low` to `high`.
    fn assert_panel(svg: &str, top: f64, unit: &str, (low, high): (f64, f64), curves: &[Drawn<'_>]) {
        // A panel is 460 high. Its frame is 46 from above and 56 from below, 70 from the left and 170 from the right of
        // 760; 4 to 64 tokens are four doublings.
        let (below, above) = (top + 460.0 - 56.0, top + 46.0);
        let y = |value: f64| below - (below - above) * (value / low).log10() / (high / low).log10();
        let places = [70.0, 70.0 + 520.0 / 2.0, 590.0];
        let has = |what: &str| assert_eq!(svg.matches(what).count(), 1, "{what}\n{svg}");
        for (at, (name, colour, dashes, values)) in curves.iter().enumerate() {
            let points: Vec<String> = places.iter().zip(values).map(|(x, v)| format!("{x:.1},{:.1}", y(*v))).collect();
            let (stroke, radius) = match *dashes {
                "none" => (String::new(), "3.2"),
                dashes => (format!(" stroke-dasharray=\"{dashes}\""), "2"),
            };
            has(&format!(
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\"{stroke}/>\n",
                points.join(" ")
            ));
            for ((x, tokens), value) in places.iter().zip([4, 16, 64]).zip(values) {
                let shown = (value * 1e6).round() / 1e6;
                has(&format!(
                    "<circle cx=\"{x:.1}\" cy=\"{:.1}\" r=\"{radius}\" fill=\"{colour}\">\
                     <title>{name}, {tokens} tokens: {shown} {unit}</title></circle>\n",
                    y(*value)
                ));
            }
            let beside = above + 12.0 + 20.0 * at as f64;
            has(&format!(
                "<line x1=\"606.0\" y1=\"{beside:.1}\" x2=\"634.0\" y2=\"{beside:.1}\" stroke=\"{colour}\" \
                 stroke-width=\"1.8\" stroke-dasharray=\"{dashes}\"/>\n{}",
                shown_text(642.0, beside + 4.0, "start", 12, name)
            ));
        }
        for (x, tokens) in places.iter().zip(["4", "16", "64"]) {
            has(&shown_text(*x, below + 18.0, "middle", 12, tokens));
        }
        has(&shown_text(330.0, below + 40.0, "middle", 12, "tokens per rank"));
        has(&shown_text(62.0, above - 10.0, "end", 12, unit));
        let mut decade = low;
        while decade <= high {
            for step in [1.0, 2.0, 5.0].map(|step| step * decade).into_iter().filter(|step| *step <= high) {
                has(&shown_text(62.0, y(step) + 4.0, "end", 12, &format!("{}", (step * 1e6).round() / 1e6)));
            }
            decade *= 10.0;
        }
    }

    fn shown_text(x: f64, y: f64, anchor: &str, size: u32, what: &str) -> String {
        format!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\" fill=\"#222222\">{what}\
             </text>\n"
        )
    }

    #[test]
    fn every_value_is_drawn_at_its_place_in_the_colour_and_dashes_of_its_legend() {
        let svg = plot(&sweep());
        let (blue, orange) = ("#1f6fb2", "#c2571a");
        assert_panel(
            &svg,
            0.0,
            "us",
            (10.0, 1000.0),
            &[
                ("combine p99", orange, "2 3", [300.0, 500.0, 1000.0]),
                ("combine p50", orange, "none", [200.0, 400.0, 800.0]),
                ("combine floor", orange, "8 4", [100.0, 150.0, 250.0]),
                ("dispatch p99", blue, "2 3", [30.0, 50.0, 90.0]),
                ("dispatch p50", blue, "none", [20.0, 40.0, 80.0]),
                ("dispatch floor", blue, "8 4", [10.0, 15.0, 25.0]),
            ],
        );
        // Bytes within and between nodes over the time; 1000 bytes a us are 1 GB/s.
        let rate = |bytes: [f64; 3], us: [f64; 3]| [0, 1, 2].map(|at: usize| bytes[at] / us[at] / 1000.0);
        let (out, back) = ([31_000.0, 95_000.0, 620_000.0], [207_000.0, 720_000.0, 3_100_000.0]);
        assert_panel(
            &svg,
            460.0,
            "GB/s",
            (1.0, 100.0),
            &[
                ("dispatch at floor", blue, "8 4", rate(out, [10.0, 15.0, 25.0])),
                ("dispatch at p50", blue, "none", rate(out, [20.0, 40.0, 80.0])),
                ("combine at floor", orange, "8 4", rate(back, [100.0, 150.0, 250.0])),
                ("combine at p50", orange, "none", rate(back, [200.0, 400.0, 800.0])),
            ],
        );
        let title = "kimi-k2: 6 x Device 0, fp8 out, fp32 back, masked, counts";
        assert!(svg.contains(&shown_text(70.0, 24.0, "start", 14, title)), "{svg}");
        let title = "sent by each rank, within its node and to others";
        assert!(svg.contains(&shown_text(70.0, 484.0, "start", 14, title)), "{svg}");
        assert!(svg.contains("width=\"760\" height=\"920\" viewBox=\"0 0 760 920\""), "{svg}");
    }

    #[test]
    fn runs_without_a_value_are_left_out_and_crowded_ticks_have_no_label() {
        let mut results = sweep();
        results[1].tokens = 0;
        (results[2].floor_us.combine, results[2].tokens) = (0.0, 60);
        let svg = plot(&results);
        let of = |name: &str| svg.matches(&format!("<title>{name}, ")).count();
        assert_eq!(
            [of("combine floor"), of("combine at floor"), of("combine p50"), of("dispatch floor")],
            [1, 1, 2, 2]
        );
        assert!(!svg.contains(", 0 tokens") && !svg.contains(">0</text>"), "{svg}");
        // 60 and 64 tokens are 48 apart on an axis from 32 to 64; 63 would be 12 from 64.
        assert_eq!((svg.matches(">60</text>").count(), svg.matches(">64</text>").count()), (2, 2));
        results[2].tokens = 63;
        let crowded = plot(&results);
        assert_eq!((crowded.matches(">63</text>").count(), crowded.matches(">64</text>").count()), (2, 0));
        let escaped = RunResult { device_name: "A & <B>".to_string(), ..merged(4) };
        assert!(plot(&[escaped]).contains("x A &amp; &lt;B&gt;, fp8 out"));
    }

    #[test]
    fn bandwidth_is_bytes_over_time() {
        assert!((gbps(4_900_000, 19.6) - 250.0).abs() < 1e-9);
        assert_eq!((gbps(0, 5.0), gbps(5, 0.0)), (0.0, 0.0));
    }
}
