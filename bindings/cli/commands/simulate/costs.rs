//! Costs of everything except the network: the GPU's parts of a phase, the crossings between GPU and proxy, the proxy.
//!
//! Constants, the same for all worlds and sizes. "Stages": read off the stages of `bench --stages`
//! (benches/results/h200-x2 of the kernels of commit 6ac5175: stages-2.json in one node, in the history of the file,
//! and stages-1x2-cx7.json in two; medians of first, middle and last block, microseconds from the call's first block).
//! "Stamps": read off time stamps between stages (docs/performance.md). "Fitted": chosen so that times without
//! statistics come out (decode-2.json, decode-1x2-cx7.json), as `tokenyard simulate --calibrate` shows. The rest are
//! measured figures of one host, or assumptions that are marked as such. Times are in ns, rates in bytes per ns (GB/s).
//!
//! Calls without statistics take specialised kernels (kernels/common/specialised.cuh), which are faster than the
//! general kernels that record stages. So stages overstate costs, and where the two differ a cost is fitted to less.

/// The costs that every projection shares.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// From the timed start to the first block's begin. With `end_ns` 5.4 us, fitted: the time of calls of 1 token in
    /// one node that is outside the stages. The split between the two is assumed, and changes no time.
    pub launch_ns: u64,
    /// The nodes of each token, and its place in each message: until rows can be packed. Stages: blocks without
    /// anything to announce are done at 2.3 (1 token) and 3.0 (128). Fitted, with `pack_ns`: 31.4 for 1 token in two
    /// nodes.
    pub route_ns: u64,
    /// Counts of one source for one node: checks, bitmap; and `meta_token_ns` per token. Stages: counts are received at
    /// 3.5 (1 token) and 6.1 (128), an NVLink trip later. Fitted: 16.1 for 128 tokens.
    pub meta_ns: u64,
    /// See `meta_ns`.
    pub meta_token_ns: u64,
    /// From a source's counts to the words of its tokens, which placing needs. Stages:
    /// a block with routing metadata completes it at 3.2 (1 token) and 5.7 (128), which is 1.0 after its counts.
    pub words_ns: u64,
    /// Starts of segments, from the counts of all sources. Stamps: 2.9 to 4.2 (1 token), of kernels in which one warp
    /// computed them. Fitted, with `pad_ns`: 12.1 for 1 token.
    pub scan_ns: u64,
    /// The same per source. Assumed, for kernels that sum counts source by source, each a load from shared memory after
    /// a store; since commit 747a15f four sources are loaded at once.
    pub scan_source_ns: u64,
    /// One row read and written: the time until the first row is done. Stamps: a single row from 1.6 to 3.1, without
    /// its tags.
    pub row_ns: u64,
    /// Packing for the wire, until the slowest block has packed its row of a chunk. Stages: marked at 3.0, the last of
    /// 128 rows packed at 12.1; for 1 row at 2.3 and 8.3, doorbells included. Fitted to less; see `route_ns`.
    pub pack_ns: u64,
    /// A rail's additions, from the last partial row of a chunk to the last sum. Stamps of four ranks on two H200s as
    /// two nodes: a single partial row has arrived at 8.2 and its sum is counted at 10.8; the rows of 128 tokens at
    /// 25.1 and 28.6, bytes included.
    pub rail_ns: u64,
    /// Packing rows for the wire, and a rail's additions: rows streamed through local memory. A lower bound: 1024
    /// rows of 14 KB are summed within a microsecond of the time for 8 (older kernels, without stages).
    pub stream_rate: f64,
    /// Pushing rows to the ranks of a node (bare stores of the same bytes: 300 to 330).
    pub push_rate: f64,
    /// Pushing partial sums, computed at the same time. Stages: 58.5 MB of 4096 tokens until 209, as fast as bare
    /// stores (347) if local rows are streamed beside them.
    pub partial_rate: f64,
    /// Placing rows at their experts. Fitted: 16.1 for 128 tokens, 12.5 for 16.
    pub place_rate: f64,
    /// From the last row placed to the last block's end: padding, and blocks with routing metadata, which plan and
    /// place last. Fitted: 12.1 for 1 token.
    pub pad_ns: u64,
    /// Flags of the node's ranks, and the first partial row. Fitted: 11.1 for 1 token, 18.0 for 128. (In stages of
    /// earlier kernels a single partial row was sent at 7.0; in later kernels any block may send it, so stages do not
    /// show it.)
    pub sum_ns: u64,
    /// The last additions at the source, of rows that warps already wait for. Stages of the earlier kernels: 7.0 to
    /// 9.1, less an NVLink trip.
    pub add_ns: u64,
    /// The same for rows from other nodes: from the arrival flag of a chunk to its rows' sums. Stamps: relayed at 21.0
    /// and summed at 23.9 for a single row, at 54.1 and 57.5 for 128 tokens. Fitted to less: 26.3 for 1 token.
    pub inter_node_add_ns: u64,
    /// From the last block's end to the timed end; see `launch_ns`.
    pub end_ns: u64,
    /// A flag or the last bytes of a row over NVLink (measured: half of a round trip of 2.65 us).
    pub nvlink_ns: u64,
    /// System-scope fence before a doorbell. Stamps: 1.5 for 1 token, up to 2.4 for 128 (3.4 if 132 blocks fence at the
    /// same time).
    pub fence_ns: u64,
    /// A word between GPU and CPU through pinned host memory, one way (measured: half of a round trip of 3.55 us).
    pub crossing_ns: u64,
    /// From the one poller to all blocks, through device memory. Assumed: two trips to L2.
    pub relay_ns: u64,
    /// One read of host memory by the poller (the GPU's half of the round trip of `crossing_ns`).
    pub poll_ns: u64,
    /// The proxy: a post. Its own code takes 0.04 us (measured); the rest is for the NIC's library.
    pub post_ns: u64,
    /// The proxy: one completion or arrival, with its flag. Assumed: the same as a post.
    pub event_ns: u64,
    /// The proxy: a poll of queues and clock that finds nothing (benches/results/proxy-amd-epyc.json).
    pub idle_poll_ns: u64,
    /// The proxy: the check of one doorbell, in ps (same file: 341 ns with 765 doorbells, 80 with 21).
    pub watch_ps: u64,
}

impl Costs {
    /// Costs of an H200 and its proxy.
    pub const H200: Costs = Costs {
        launch_ns: 3_800,
        route_ns: 2_400,
        meta_ns: 2_200,
        meta_token_ns: 14,
        words_ns: 1_000,
        scan_ns: 1_000,
        scan_source_ns: 20,
        row_ns: 1_500,
        pack_ns: 4_000,
        rail_ns: 3_000,
        stream_rate: 1_500.0,
        push_rate: 300.0,
        partial_rate: 340.0,
        place_rate: 3_000.0,
        pad_ns: 700,
        sum_ns: 3_900,
        add_ns: 700,
        inter_node_add_ns: 2_600,
        end_ns: 1_600,
        nvlink_ns: 1_300,
        fence_ns: 1_800,
        crossing_ns: 1_800,
        relay_ns: 1_000,
        poll_ns: 1_200,
        post_ns: 150,
        event_ns: 150,
        idle_poll_ns: 75,
        watch_ps: 350,
    };
}

/// Time that `bytes` bytes take at a rate.
pub fn at_rate(bytes: u64, rate: f64) -> u64 {
    (bytes as f64 / rate).ceil() as u64
}

/// A resource that serves one request after the other.
#[derive(Debug, Clone, Copy, Default)]
pub struct Server {
    free_ns: u64,
}

impl Server {
    /// When a request ends that can begin at `ready_ns` and takes `for_ns`.
    pub fn serve(&mut self, ready_ns: u64, for_ns: u64) -> u64 {
        self.free_ns = self.free_ns.max(ready_ns) + for_ns;
        self.free_ns
    }

    /// When a request ends that takes `for_ns` and whose last part arrives at `now_ns`: at once, unless the resource
    /// was busy with others.
    pub fn absorb(&mut self, now_ns: u64, for_ns: u64) -> u64 {
        self.free_ns = (self.free_ns + for_ns).max(now_ns);
        self.free_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_waits_for_work_and_work_for_the_server() {
        let mut server = Server::default();
        assert_eq!([server.serve(10, 5), server.serve(0, 5), server.serve(100, 1)], [15, 20, 101]);
        assert_eq!(at_rate(1500, 300.0), 5);
        let mut port = Server::default();
        assert_eq!([port.absorb(100, 20), port.absorb(105, 20), port.absorb(400, 20)], [100, 120, 400]);
    }
}
