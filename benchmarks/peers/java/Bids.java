import java.lang.invoke.MethodHandles;
import java.lang.invoke.VarHandle;
import java.nio.ByteOrder;
import java.util.HashSet;
import java.util.Set;
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
 * The bids of computed.py, row for row, as a Flink table source: fields auction, bidder, price,
 * date_time, extra. Every row is computed from its number; only the fields a query uses are made.
 */
public class Bids implements DynamicTableSourceFactory {
    static final ConfigOption<Long> ROWS = ConfigOptions.key("rows").longType().noDefaultValue();

    @Override
    public String factoryIdentifier() {
        return "computed-bids";
    }

    @Override
    public Set<ConfigOption<?>> requiredOptions() {
        return new HashSet<>(Set.of(ROWS));
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
        return new Table(options.get(ROWS), fields);
    }

    static class Table implements ScanTableSource, SupportsProjectionPushDown {
        private final long rows;
        private int[] fields;

        Table(long rows, int[] fields) {
            this.rows = rows;
            this.fields = fields;
        }

        @Override
        public ChangelogMode getChangelogMode() {
            return ChangelogMode.insertOnly();
        }

        @Override
        public ScanRuntimeProvider getScanRuntimeProvider(ScanContext context) {
            return SourceFunctionProvider.of(new Rows(rows, fields), true);
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
            return new Table(rows, fields);
        }

        @Override
        public String asSummaryString() {
            return "computed-bids";
        }
    }

    static class Rows extends RichParallelSourceFunction<RowData> {
        private static final int BLOCK = 1 << 15;
        private static final int CHUNK = 1024;
        private static final long BASE = 1436918400000L;
        private static final int WORDS = 7;
        private static final long FIRST = 0x9E3779B97F4A7C15L;
        private static final long SECOND = 0xBF58476D1CE4E5B9L;
        private static final VarHandle LONGS =
                MethodHandles.byteArrayViewVarHandle(long[].class, ByteOrder.LITTLE_ENDIAN);
        private final long rows;
        private final int[] fields;
        private volatile boolean running = true;

        Rows(long rows, int[] fields) {
            this.rows = rows;
            this.fields = fields;
        }

        @Override
        public void run(SourceContext<RowData> context) {
            int all = getRuntimeContext().getTaskInfo().getNumberOfParallelSubtasks();
            int own = getRuntimeContext().getTaskInfo().getIndexOfThisSubtask();
            long blocks = (rows + BLOCK - 1) / BLOCK;
            for (long block = own; block < blocks && running; block += all) {
                long end = Math.min(rows, (block + 1) * BLOCK);
                for (long first = block * BLOCK; first < end && running; first += CHUNK) {
                    synchronized (context.getCheckpointLock()) {
                        long last = Math.min(end, first + CHUNK);
                        for (long row = first; row < last; row++) {
                            context.collect(make(row));
                        }
                    }
                }
            }
        }

        private RowData make(long row) {
            GenericRowData made = new GenericRowData(fields.length);
            long epoch = row / 46;
            long draw = row * FIRST;
            draw ^= draw >>> 32;
            draw *= SECOND;
            draw ^= draw >>> 29;
            for (int i = 0; i < fields.length; i++) {
                made.setField(i, field(fields[i], epoch, row - epoch * 46, draw));
            }
            return made;
        }

        private static Object field(int field, long epoch, long inEpoch, long draw) {
            switch (field) {
                case 0:
                    long newest = epoch * 3 + 2;
                    return (draw & 1) != 0
                            ? newest / 100 * 100 + 1000
                            : recent(newest, draw >>> 1 & 0xFFFF, 100);
                case 1:
                    return (draw >>> 17 & 3) != 0
                            ? epoch / 100 * 100 + 1001
                            : recent(epoch, draw >>> 19 & 0xFFFF, 1000);
                case 2:
                    return ((draw >>> 35 & 127) + 1) * 100 << ((draw >>> 42 & 1023) * 13 >> 10);
                case 3:
                    return TimestampData.fromEpochMillis(BASE + epoch * 5 + (inEpoch + 4) / 10);
                default:
                    return extra(draw);
            }
        }

        private static long recent(long newest, long draw, long window) {
            long oldest = Math.max(newest - window, 0);
            return oldest + (draw * (newest - oldest + 11) >> 16) + 1000;
        }

        private static StringData extra(long draw) {
            byte[] letters = new byte[WORDS * 8];
            for (int i = 0; i < WORDS; i++) {
                long word = draw * (FIRST + 2 * i) >>> 4;
                LONGS.set(letters, i * 8, (word & 0x0F0F0F0F0F0F0F0FL) + 0x6161616161616161L);
            }
            return StringData.fromBytes(letters);
        }

        @Override
        public void cancel() {
            running = false;
        }
    }
}
