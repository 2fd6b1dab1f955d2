import java.io.DataInputStream;
import java.io.FileInputStream;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.LongBuffer;
import java.util.HashSet;
import java.util.Set;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.configuration.ConfigOption;
import org.apache.flink.configuration.ConfigOptions;
import org.apache.flink.configuration.ReadableConfig;
import org.apache.flink.legacy.table.connector.source.SourceFunctionProvider;
import org.apache.flink.streaming.api.functions.source.legacy.RichParallelSourceFunction;
import org.apache.flink.table.connector.ChangelogMode;
import org.apache.flink.table.connector.source.DynamicTableSource;
import org.apache.flink.table.connector.source.ScanTableSource;
import org.apache.flink.table.connector.source.abilities.SupportsProjectionPushDown;
import org.apache.flink.table.data.GenericRowData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.data.StringData;
import org.apache.flink.table.data.TimestampData;
import org.apache.flink.table.factories.DynamicTableSourceFactory;
import org.apache.flink.table.factories.FactoryUtil;
import org.apache.flink.table.types.DataType;

/**
 * The bids of headgate's Nexmark generator, row for row, as a Flink table source: fields auction,
 * bidder, price, date_time, extra. Random draws come from the pools that headgate wrote to a file, so
 * a row costs a few array reads. Makes only the fields a query uses, as headgate's does.
 */
public class Bids implements DynamicTableSourceFactory {
    static final ConfigOption<String> POOLS =
            ConfigOptions.key("pools").stringType().noDefaultValue();
    static final ConfigOption<Long> ROWS = ConfigOptions.key("rows").longType().noDefaultValue();

    @Override
    public String factoryIdentifier() {
        return "nexmark-bids";
    }

    @Override
    public Set<ConfigOption<?>> requiredOptions() {
        return new HashSet<>(Set.of(POOLS, ROWS));
    }

    @Override
    public Set<ConfigOption<?>> optionalOptions() {
        return new HashSet<>();
    }

    @Override
    public DynamicTableSource createDynamicTableSource(Context context) {
        FactoryUtil.TableFactoryHelper helper = FactoryUtil.createTableFactoryHelper(this, context);
        helper.validate();
        ReadableConfig options = helper.getOptions();
        int[] fields = {0, 1, 2, 3, 4};
        return new Table(options.get(POOLS), options.get(ROWS), fields);
    }

    static class Table implements ScanTableSource, SupportsProjectionPushDown {
        private final String pools;
        private final long rows;
        private int[] fields;

        Table(String pools, long rows, int[] fields) {
            this.pools = pools;
            this.rows = rows;
            this.fields = fields;
        }

        @Override
        public ChangelogMode getChangelogMode() {
            return ChangelogMode.insertOnly();
        }

        @Override
        public ScanRuntimeProvider getScanRuntimeProvider(ScanContext context) {
            return SourceFunctionProvider.of(new Rows(pools, rows, fields), true);
        }

        @Override
        public boolean supportsNestedProjection() {
            return false;
        }

        @Override
        public void applyProjection(int[][] projected, DataType type) {
            fields = new int[projected.length];
            for (int i = 0; i < projected.length; i++) {
                fields[i] = projected[i][0];
            }
        }

        @Override
        public DynamicTableSource copy() {
            return new Table(pools, rows, fields);
        }

        @Override
        public String asSummaryString() {
            return "nexmark-bids";
        }
    }

    static class Rows extends RichParallelSourceFunction<RowData> {
        private static final int BLOCK = 1 << 16;
        private static final int EXTRA = 60;
        private static final int CHUNK = 1024;
        private static final long BASE = 1436918400000L;
        private final String path;
        private final long rows;
        private final int[] fields;
        private volatile boolean running = true;
        private transient long[] auctionDraws, auctionHot, bidderDraws, bidderHot, prices, starts;
        private transient byte[] extras;

        Rows(String path, long rows, int[] fields) {
            this.path = path;
            this.rows = rows;
            this.fields = fields;
        }

        @Override
        public void open(OpenContext context) throws IOException {
            try (DataInputStream in = new DataInputStream(new FileInputStream(path))) {
                auctionDraws = longs(in);
                auctionHot = longs(in);
                bidderDraws = longs(in);
                bidderHot = longs(in);
                prices = longs(in);
                starts = longs(in);
                extras = in.readAllBytes();
            }
        }

        private static long[] longs(DataInputStream in) throws IOException {
            int count = (int) Long.reverseBytes(in.readLong());
            byte[] bytes = in.readNBytes(count * 8);
            LongBuffer buffer = ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN).asLongBuffer();
            long[] values = new long[count];
            buffer.get(values);
            return values;
        }

        @Override
        public void run(SourceContext<RowData> context) {
            int all = getRuntimeContext().getTaskInfo().getNumberOfParallelSubtasks();
            int own = getRuntimeContext().getTaskInfo().getIndexOfThisSubtask();
            long blocks = (rows + BLOCK - 1) / BLOCK;
            for (long block = own; block < blocks && running; block += all) {
                int shift = (int) starts[(int) block];
                long end = Math.min(rows, (block + 1) * BLOCK);
                for (long first = block * BLOCK; first < end && running; first += CHUNK) {
                    synchronized (context.getCheckpointLock()) {
                        long last = Math.min(end, first + CHUNK);
                        for (long row = first; row < last; row++) {
                            context.collect(make(row, shift + (int) (row - block * BLOCK)));
                        }
                    }
                }
            }
        }

        private RowData make(long row, int at) {
            GenericRowData made = new GenericRowData(fields.length);
            long epoch = row / 46;
            for (int i = 0; i < fields.length; i++) {
                made.setField(i, field(fields[i], epoch, row - epoch * 46, at));
            }
            return made;
        }

        private Object field(int field, long epoch, long inEpoch, int at) {
            switch (field) {
                case 0:
                    return recent(epoch * 3 + 2, auctionDraws[at], auctionHot[at], 100, 0);
                case 1:
                    return recent(epoch, bidderDraws[at], bidderHot[at], 1000, 1);
                case 2:
                    return prices[at];
                case 3:
                    return TimestampData.fromEpochMillis(BASE + epoch * 5 + (inEpoch + 4) / 10);
                default:
                    return StringData.fromBytes(extras, at * EXTRA, EXTRA);
            }
        }

        private static long recent(long newest, long draw, long hot, long window, long plus) {
            if (hot != 0) {
                return newest / 100 * 100 + plus + 1000;
            }
            long oldest = Math.max(newest - window, 0);
            return oldest + draw % (newest - oldest + 11) + 1000;
        }

        @Override
        public void cancel() {
            running = false;
        }
    }
}
