import java.io.DataOutputStream;
import java.io.FileOutputStream;
import java.io.BufferedOutputStream;
import java.io.IOException;
import java.time.Duration;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.AggregateFunction;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.sink.legacy.RichSinkFunction;
import org.apache.flink.streaming.api.functions.source.legacy.RichParallelSourceFunction;
import org.apache.flink.streaming.api.functions.windowing.ProcessWindowFunction;
import org.apache.flink.streaming.api.windowing.assigners.TumblingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.windows.TimeWindow;
import org.apache.flink.util.Collector;

/**
 * The job of record_latency.py as a Flink DataStream, at defaults with object reuse: arguments rate,
 * seconds, parallelism, "records" or "windows", warm-up in seconds, directory. Each sink subtask writes
 * the latencies it saw, in ms, as big-endian doubles.
 */
public class Latency {
    static final long KEYS = 10_000;
    static final long WINDOW_US = 1_000_000;

    /** A key, a count, and when the record was due, in µs of the machine's clock. */
    static class Paced extends RichParallelSourceFunction<Tuple3<Long, Long, Long>> {
        private final double rate;
        private final double seconds;
        private volatile boolean running = true;

        Paced(double rate, double seconds) {
            this.rate = rate;
            this.seconds = seconds;
        }

        @Override
        public void run(SourceContext<Tuple3<Long, Long, Long>> context) throws Exception {
            int all = getRuntimeContext().getTaskInfo().getNumberOfParallelSubtasks();
            int own = getRuntimeContext().getTaskInfo().getIndexOfThisSubtask();
            double ownRate = rate / all;
            long rows = (long) (ownRate * seconds);
            long began = nowUs();
            for (long row = 0; row < rows && running; ) {
                long elapsed = nowUs() - began;
                long due = Math.min((long) (elapsed * ownRate / 1e6) + 1, rows);
                if (due > row) {
                    synchronized (context.getCheckpointLock()) {
                        for (; row < due; row++) {
                            long at = began + (long) (row * (1e6 / ownRate));
                            long key = (row * 2_654_435_761L + own) % KEYS;
                            context.collectWithTimestamp(Tuple3.of(key, 1L, at), at / 1000);
                        }
                    }
                }
                Thread.sleep(1);
            }
        }

        @Override
        public void cancel() {
            running = false;
        }
    }

    /** Takes the time from the third field, in µs, until now. */
    static class Sink extends RichSinkFunction<Tuple3<Long, Long, Long>> {
        private final long warmUs;
        private final String directory;
        private transient double[] found;
        private transient int count;
        private transient long first;

        Sink(double warmSeconds, String directory) {
            this.warmUs = (long) (warmSeconds * 1e6);
            this.directory = directory;
        }

        @Override
        public void open(OpenContext context) {
            found = new double[1 << 16];
        }

        @Override
        public void invoke(Tuple3<Long, Long, Long> record, Context context) {
            if (first == 0) {
                first = record.f2;
            }
            if (record.f2 - first < warmUs) {
                return;
            }
            if (count == found.length) {
                found = java.util.Arrays.copyOf(found, 2 * count);
            }
            found[count++] = (nowUs() - record.f2) / 1e3;
        }

        @Override
        public void close() throws IOException {
            int own = getRuntimeContext().getTaskInfo().getIndexOfThisSubtask();
            FileOutputStream file = new FileOutputStream(directory + "/latency-" + own + ".bin");
            try (DataOutputStream out = new DataOutputStream(new BufferedOutputStream(file))) {
                for (int i = 0; i < count; i++) {
                    out.writeDouble(found[i]);
                }
            }
        }
    }

    static class Count implements AggregateFunction<Tuple3<Long, Long, Long>, Long, Long> {
        @Override
        public Long createAccumulator() {
            return 0L;
        }

        @Override
        public Long add(Tuple3<Long, Long, Long> record, Long count) {
            return count + 1;
        }

        @Override
        public Long getResult(Long count) {
            return count;
        }

        @Override
        public Long merge(Long a, Long b) {
            return a + b;
        }
    }

    static class End extends ProcessWindowFunction<Long, Tuple3<Long, Long, Long>, Long, TimeWindow> {
        @Override
        public void process(
                Long key,
                Context context,
                Iterable<Long> counts,
                Collector<Tuple3<Long, Long, Long>> out) {
            long end = context.window().getEnd() * 1000;
            out.collect(Tuple3.of(key, counts.iterator().next(), end));
        }
    }

    static long nowUs() {
        java.time.Instant now = java.time.Instant.now();
        return now.getEpochSecond() * 1_000_000 + now.getNano() / 1000;
    }

    public static void main(String[] args) throws Exception {
        Configuration configuration = new Configuration();
        configuration.setString("rest.port", "0");
        configuration.setString("pipeline.object-reuse", "true");
        StreamExecutionEnvironment env =
                StreamExecutionEnvironment.createLocalEnvironment(
                        Integer.parseInt(args[2]), configuration);
        double seconds = Double.parseDouble(args[1]);
        DataStream<Tuple3<Long, Long, Long>> read =
                env.addSource(new Paced(Double.parseDouble(args[0]), seconds))
                        .returns(
                                org.apache.flink.api.common.typeinfo.Types.TUPLE(
                                        org.apache.flink.api.common.typeinfo.Types.LONG,
                                        org.apache.flink.api.common.typeinfo.Types.LONG,
                                        org.apache.flink.api.common.typeinfo.Types.LONG));
        DataStream<Tuple3<Long, Long, Long>> made;
        if (args[3].equals("windows")) {
            made =
                    read.assignTimestampsAndWatermarks(
                                    WatermarkStrategy
                                            .<Tuple3<Long, Long, Long>>forMonotonousTimestamps()
                                            .withTimestampAssigner((r, t) -> r.f2 / 1000))
                            .keyBy(record -> record.f0)
                            .window(TumblingEventTimeWindows.of(Duration.ofNanos(WINDOW_US * 1000)))
                            .aggregate(new Count(), new End());
        } else {
            made =
                    read.keyBy(record -> record.f0)
                            .reduce((a, b) -> Tuple3.of(a.f0, a.f1 + b.f1, b.f2));
        }
        made.addSink(new Sink(Double.parseDouble(args[4]), args[5]));
        env.execute("latency");
    }
}
