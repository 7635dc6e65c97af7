//! The median of pairs' ratios or differences, and how sure it is.

/// A median with its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Median {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

impl Median {
    /// Of at least one value. The interval lies between two of the sorted values, by how a binomial distribution with
    /// p = 1/2 spreads around its mean (its normal approximation; Conover, Practical Nonparametric Statistics, section
    /// 3.2).
    pub fn of(mut values: Vec<f64>) -> Median {
        values.sort_unstable_by(f64::total_cmp);
        let count = values.len() as f64;
        let reach = 1.96 * count.sqrt() / 2.0;
        let at =
            |place: f64| values.get(place.clamp(0.0, (count - 1.0).max(0.0)) as usize).copied().unwrap_or(f64::NAN);
        let middle = (at((count / 2.0 - 0.5).floor()) + at((count / 2.0).floor())) / 2.0;
        Median { median: middle, low: at((count / 2.0 - reach).floor()), high: at((count / 2.0 + reach).floor()) }
    }
}

/// What a median is held to.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bar {
    AtLeast(f64),
    AtMost(f64),
}

impl Bar {
    /// Whether some value of the interval is within the bar: a median whose whole interval lies beyond it has failed.
    pub fn admits(self, Median { low, high, .. }: Median) -> bool {
        match self {
            Bar::AtLeast(least) => high >= least,
            Bar::AtMost(most) => low <= most,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_lies_within_its_interval() {
        let forty = Median::of((1..=40).rev().map(f64::from).collect());
        // By the table of the binomial distribution: the 14th and the 27th of 40.
        assert_eq!(forty, Median { median: 20.5, low: 14.0, high: 27.0 });
        assert_eq!(Median::of(vec![3.0, 1.0, 2.0]), Median { median: 2.0, low: 1.0, high: 3.0 });
        assert_eq!(Median::of(vec![7.0]), Median { median: 7.0, low: 7.0, high: 7.0 });
    }

    #[test]
    fn a_bar_fails_only_what_lies_beyond_it_with_all_of_its_interval() {
        let around = |low, high| Median { median: f64::midpoint(low, high), low, high };
        assert!(Bar::AtMost(1.15).admits(around(1.1, 1.3)) && !Bar::AtMost(1.15).admits(around(1.16, 1.3)));
        assert!(Bar::AtLeast(0.9).admits(around(0.8, 0.91)) && !Bar::AtLeast(0.9).admits(around(0.8, 0.89)));
    }
}
