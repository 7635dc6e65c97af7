//! What everything but the network costs: the GPU's parts of a phase, the crossings between GPU and proxy, the proxy.
//!
//! Plain numbers, the same for all worlds and sizes. Those of the GPU reproduce the one-node times of docs/performance.md
//! (`tokenyard simulate --calibrate` shows how well); the others are measured figures of one host, or assumptions that
//! are marked as such. Times are in ns, rates in bytes per ns (GB/s).

/// The costs that every projection shares.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// From the start that is timed to the kernel's first loads.
    pub launch_ns: u64,
    /// Which nodes each token goes to, and its place in each message: until rows can be packed. Assumed: as long as a
    /// launch, being one pass over the choices and a barrier.
    pub route_ns: u64,
    /// META of one source for one node: checks, bitmap, positions; and so much more per token of it.
    pub meta_ns: u64,
    /// See `meta_ns`.
    pub meta_token_ns: u64,
    /// Starts of segments, from the counts of all sources.
    pub scan_ns: u64,
    /// The same per source. Assumed: four sources are the most that was measured, and the scan reads all.
    pub scan_source_ns: u64,
    /// One row read and written: the time until the first is through.
    pub row_ns: u64,
    /// Packing rows for the wire, and a rail's additions: rows streamed through local memory. At least: 1024 rows of
    /// 14 KB are summed within a microsecond of the time for 8.
    pub stream_rate: f64,
    /// Pushing rows to the ranks of a node (bare stores of the same bytes: 300 to 330).
    pub push_rate: f64,
    /// Pushing partial sums, which are made meanwhile.
    pub partial_rate: f64,
    /// Placing rows at their experts, all SMs together; and one SM, which serves `PLACE_SLOTS` tokens of a source.
    pub place_rate: f64,
    /// See `place_rate`.
    pub place_sm_rate: f64,
    /// Flags of the node's ranks, and the first partial row.
    pub sum_ns: u64,
    /// The last additions at home.
    pub add_ns: u64,
    /// From the last row to the end that is timed.
    pub end_ns: u64,
    /// A flag or the last bytes of a row over NVLink (measured: half of a round trip of 2.65 us).
    pub nvlink_ns: u64,
    /// System-scope fence before a doorbell (measured: 1.5 us, 3.4 with 132 blocks at once).
    pub fence_ns: u64,
    /// A word between GPU and CPU through pinned host memory, one way (measured: half of a round trip of 3.55 us).
    pub crossing_ns: u64,
    /// From the one poller to all blocks, through device memory. Assumed: two trips to L2.
    pub relay_ns: u64,
    /// One read of host memory by the poller (the GPU's half of that round trip).
    pub poll_ns: u64,
    /// The proxy: a post, taken from 60 to 150 ns.
    pub post_ns: u64,
    /// The proxy: one completion or arrival, with its flag. Assumed: as a post.
    pub event_ns: u64,
    /// The proxy: a turn in which it looks at queues and clock and finds nothing. Assumed.
    pub turn_ns: u64,
    /// The proxy: a look at one doorbell, in ps. Assumed: it is in the cache until it is rung, and links are adjacent.
    pub watch_ps: u64,
}

/// Tokens of a source that one SM places: a block has 16 warps, one for each.
pub const PLACE_SLOTS: usize = 16;
/// SMs of the GPUs that were measured.
pub const SMS: usize = 132;

impl Costs {
    /// As calibrated.
    pub const H200: Costs = Costs {
        launch_ns: 4_000,
        route_ns: 4_000,
        meta_ns: 8_000,
        meta_token_ns: 35,
        scan_ns: 5_000,
        scan_source_ns: 5,
        row_ns: 2_000,
        stream_rate: 1_500.0,
        push_rate: 300.0,
        partial_rate: 250.0,
        place_rate: 500.0,
        place_sm_rate: 50.0,
        sum_ns: 5_900,
        add_ns: 3_000,
        end_ns: 1_700,
        nvlink_ns: 1_300,
        fence_ns: 3_400,
        crossing_ns: 1_800,
        relay_ns: 1_000,
        poll_ns: 1_200,
        post_ns: 150,
        event_ns: 150,
        turn_ns: 100,
        watch_ps: 1_500,
    };

    /// Rate at which a rank places rows, if `tokens` of each of `sources` sources may have some.
    pub fn place(&self, sources: usize, tokens: usize) -> f64 {
        let sms = (sources * tokens).div_ceil(PLACE_SLOTS).clamp(1, SMS);
        (sms as f64 * self.place_sm_rate).min(self.place_rate)
    }
}

/// Time of so many bytes at a rate.
pub fn at_rate(bytes: u64, rate: f64) -> u64 {
    (bytes as f64 / rate).ceil() as u64
}

/// Something that does one thing after the other.
#[derive(Debug, Clone, Copy, Default)]
pub struct Server {
    free_ns: u64,
}

impl Server {
    /// When something is done that could begin at `ready_ns` and takes `for_ns`.
    pub fn serve(&mut self, ready_ns: u64, for_ns: u64) -> u64 {
        self.free_ns = self.free_ns.max(ready_ns) + for_ns;
        self.free_ns
    }

    /// When something is through that takes `for_ns` and whose last part comes at `now_ns`: at once, unless other things
    /// came meanwhile.
    pub fn absorb(&mut self, now_ns: u64, for_ns: u64) -> u64 {
        self.free_ns = (self.free_ns + for_ns).max(now_ns);
        self.free_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_tokens_are_placed_by_few_sms() {
        let costs = Costs::H200;
        assert_eq!(costs.place(1, 1), 50.0);
        assert_eq!(costs.place(2, 16), 100.0);
        assert_eq!(costs.place(64, 128), 500.0);
    }

    #[test]
    fn a_server_waits_for_work_and_work_for_the_server() {
        let mut server = Server::default();
        assert_eq!([server.serve(10, 5), server.serve(0, 5), server.serve(100, 1)], [15, 20, 101]);
        assert_eq!(at_rate(1500, 300.0), 5);
        let mut port = Server::default();
        assert_eq!([port.absorb(100, 20), port.absorb(105, 20), port.absorb(400, 20)], [100, 120, 400]);
    }
}
