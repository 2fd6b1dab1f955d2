import java.util.Collection;
import java.util.List;
import java.util.Set;
import org.apache.flink.configuration.ConfigOption;
import org.apache.flink.table.connector.source.DynamicTableSource;
import org.apache.flink.table.connector.source.LookupTableSource;
import org.apache.flink.table.connector.source.lookup.LookupFunctionProvider;
import org.apache.flink.table.data.GenericRowData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.data.StringData;
import org.apache.flink.table.factories.DynamicTableSourceFactory;
import org.apache.flink.table.functions.FunctionContext;
import org.apache.flink.table.functions.LookupFunction;

/** The bounded side input of q13, (id, side) for ids 0 to 99: a table in memory to look rows up in. */
public class Side implements DynamicTableSourceFactory {
    private static final int ROWS = 100;

    @Override
    public String factoryIdentifier() {
        return "nexmark-side";
    }

    @Override
    public Set<ConfigOption<?>> requiredOptions() {
        return Set.of();
    }

    @Override
    public Set<ConfigOption<?>> optionalOptions() {
        return Set.of();
    }

    @Override
    public DynamicTableSource createDynamicTableSource(Context context) {
        return new Table();
    }

    static class Table implements LookupTableSource {
        @Override
        public LookupRuntimeProvider getLookupRuntimeProvider(LookupContext context) {
            return LookupFunctionProvider.of(new Rows());
        }

        @Override
        public DynamicTableSource copy() {
            return new Table();
        }

        @Override
        public String asSummaryString() {
            return "nexmark-side";
        }
    }

    public static class Rows extends LookupFunction {
        private transient Collection<RowData>[] rows;

        @Override
        @SuppressWarnings("unchecked")
        public void open(FunctionContext context) {
            rows = new Collection[ROWS];
            for (int id = 0; id < ROWS; id++) {
                RowData row = GenericRowData.of((long) id, StringData.fromString("side " + id));
                rows[id] = List.of(row);
            }
        }

        @Override
        public Collection<RowData> lookup(RowData key) {
            return rows[(int) key.getLong(0)];
        }
    }
}
